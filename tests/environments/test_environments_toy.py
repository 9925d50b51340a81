from __future__ import annotations

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from ludus.environments.check import check_environment
from ludus.environments.command_toy import CommandEnv, OrderEnv
from ludus.environments.config import EnvConfig
from ludus.environments.entity_toy import MatchEnv, MotionEnv, NeighbourEnv
from ludus.environments.image_toy import CatchEnv, MemoryImageEnv, QuestionEnv
from ludus.environments.toy import CountingEnv, MaskedEnv, MemoryEnv, MixedActionEnv, NoVelocityCartPole, TargetEnv

TOYS = {
    "counting": CountingEnv,
    "memory": MemoryEnv,
    "masked": MaskedEnv,
    "masked in info": lambda: MaskedEnv(in_info=True),
    "mixed": MixedActionEnv,
    "mixed with more": lambda: MixedActionEnv(more=True),
    "target": TargetEnv,
    "no velocity": NoVelocityCartPole,
    "catch": CatchEnv,
    "question": QuestionEnv,
    "memory of images": MemoryImageEnv,
    "match": MatchEnv,
    "neighbour": NeighbourEnv,
    "motion": MotionEnv,
    "order": OrderEnv,
}


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.filterwarnings("ignore")
def test_toys_pass_gymnasiums_check_and_ours(name):
    check_env(TOYS[name](), skip_render_check=True)
    assert check_environment(EnvConfig(), TOYS[name]).problems == []


def test_memory_rewards_recall_only():
    env = MemoryEnv(length=3, cues=3)
    recalled, guessed = [], []
    seen = set()
    for seed in range(600):
        first, _ = env.reset(seed=seed)
        for total in (recalled, guessed):
            env.reset(seed=seed)
            middle, last = env.step(0)[0], env.step(0)[0]
            answer = int(first[:3].argmax()) if total is recalled else 1
            total.append(env.step(answer)[1])
            seen |= {middle.tobytes(), last.tobytes()}
    assert set(recalled) == {1.0}
    assert abs(np.mean(guessed)) < 0.1
    assert len(seen) == 2  # later observations tell the step, never the cue


def test_masked_rewards():
    env = MaskedEnv(choices=6, allowed=2, length=3)
    observation, _ = env.reset(seed=1)
    mask, target = observation["action_mask"], int(observation["observation"].argmax())
    assert mask.sum() == 2
    assert mask[target] == 1
    observation, reward, terminated, *_ = env.step(target)
    assert (reward, terminated) == (1.0, False)
    illegal = int(np.flatnonzero(observation["action_mask"] == 0)[0])
    assert env.step(illegal)[1:3] == (-1.0, True)


@pytest.mark.parametrize("more", [False, True])
def test_mixed_rewards_all_parts_together(more):
    env = MixedActionEnv(more=more)
    shown, _ = env.reset(seed=0)
    right = {"choice": int(shown[:3].argmax()), "amount": shown[3:5]}
    if more:
        right |= {"switches": shown[5:7].astype(np.int8), "dials": shown[7:9].astype(np.int64)}
    for spoilt, reward in ((None, 1.0), ("choice", 0.0), *((("switches", 0.0), ("dials", 0.0)) if more else ())):
        env.reset(seed=0)
        action = right | ({spoilt: right[spoilt] - 1} if spoilt else {})
        assert env.step(action)[1] == pytest.approx(reward)
    env.reset(seed=0)
    assert env.step(right | {"amount": right["amount"] + 0.5})[1] == pytest.approx(0.75)


def test_target_is_best_at_the_reversed_observation():
    env = TargetEnv(dims=3)
    observation, _ = env.reset(seed=0)
    observation, reward, *_ = env.step(observation[::-1])
    assert reward == 0
    assert env.step(observation[::-1] + 1)[1] == pytest.approx(-3, rel=1e-5)


def test_no_velocity_hides_velocities_and_ends_like_cartpole():
    env = NoVelocityCartPole()
    assert env.reset(seed=0)[0].shape == (2,)
    steps = 0
    while not (result := env.step(0))[2]:
        assert result[0].shape == (2,)
        steps += 1
    assert 5 < steps < 15


def test_catch_rewards_balls_that_touch_the_paddle():
    env = CatchEnv()
    for seed in range(20):
        image, _ = env.reset(seed=seed)
        returns, ends, steps = 0.0, False, 0
        while not ends:
            ball, paddle = (int(np.flatnonzero(image[..., channel].any(0)).mean()) for channel in (0, 1))
            image, reward, ends, *_ = env.step(1 + np.sign(ball - paddle))
            returns, steps = returns + reward, steps + 1
        assert (returns, steps) == (5.0, 5 * 16)
    env.reset(seed=0)
    env._column = 0  # and the paddle stays in the middle
    assert [env.step(1)[1] for _ in range(16)] == [0.0] * 15 + [-1.0]


def test_question_rewards_the_right_half():
    env = QuestionEnv()
    observation, _ = env.reset(seed=0)
    for step in range(16):
        image, question = observation["inner"]["image"][..., 0], int(observation["inner"]["question"].argmax())
        assert (image == 255).sum() == 4
        right = int(np.argwhere(image == 255)[0][question] >= 6)
        observation, reward, terminated, *_ = env.step(right if step % 2 == 0 else 1 - right)
        assert (reward, terminated) == (float(step % 2 == 0), step == 15)


def score(env, answer, steps=400):
    """Return the mean reward of answering each observation."""
    observation, _ = env.reset(seed=0)
    rewards = []
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = env.step(answer(observation))
        rewards.append(reward)
        if terminated or truncated:
            observation, _ = env.reset()
    return np.mean(rewards)


def test_the_value_of_the_matching_entity_is_rewarded():
    def match(entities):
        question = entities[entities[:, 0] == 1][0]
        same = (entities[:, 1:9] == question[1:9]).all(1) & (entities[:, 0] == 0)
        return int(entities[same][0, 9:].argmax())

    env = MatchEnv()
    assert score(env, match) == 1
    counts = {len(env.reset(seed=seed)[0]) for seed in range(200)}
    assert counts == set(range(4, 9))
    assert score(env, lambda entities: int(entities[:, 9:].sum(0).argmax())) < 0.6  # the most frequent value


def test_the_colour_of_the_neighbour_is_rewarded():
    def neighbour(graph):
        marked = int(graph.nodes[:, 0].argmax())
        (end,) = graph.edge_links[graph.edge_links[:, 0] == marked, 1]
        return int(graph.nodes[end, 1:].argmax())

    assert score(NeighbourEnv(), neighbour) == 1
    assert score(NeighbourEnv(), lambda graph: int(graph.nodes[:, 1:].sum(0).argmax())) < 0.7


def test_motion_shows_in_two_frames_but_not_in_one():
    def moved(movie):
        for direction, shift in enumerate(MotionEnv.DIRECTIONS):
            if (np.roll(movie[0], shift, (0, 1)) == movie[1]).all():
                return direction
        raise AssertionError

    env = MotionEnv()
    assert score(env, moved) == 1
    first = {}
    for seed in range(3000):
        movie, _ = env.reset(seed=seed)
        first.setdefault(movie[0].tobytes(), set()).add(moved(movie))
    assert len(first) == 100  # every place ...
    assert all(directions == {0, 1, 2, 3} for directions in first.values())  # ... with every direction


def test_images_after_the_cue_do_not_tell_it():
    env, seen, returns = MemoryImageEnv(length=3), set(), []
    for seed in range(40):
        first, _ = env.reset(seed=seed)
        rows, columns = first[:, :, 0].nonzero()
        assert len(rows) == 4
        later = [env.step(0)[0] for _ in range(2)]
        seen |= {image.tobytes() for image in later}
        returns.append(env.step(2 * (rows[0] > 0) + (columns[0] > 0))[1])
    assert set(returns) == {1.0}
    assert len(seen) == 2


def test_commands_are_right_at_the_cell_of_their_colour_with_the_enemy_as_target() -> None:
    env = CommandEnv()
    observation, info = env.reset(seed=0)
    seen = set()
    for step in range(1, 41):
        function = int(info["action_mask"]["function"].nonzero()[0][1])
        seen.add(function)
        colour = {1: 1, 2: 2, 3: 0}[function]
        place = np.argwhere(observation["screen"][colour])[0]
        enemy = int(np.argmax(observation["units"][:, 0] * observation["units/mask"]))
        wrong = {"function": function, "place": (place + 1) % 6, "target": enemy}
        right = wrong | {"place": place}
        if step % 2:
            observation, reward, terminated, _, info = env.step(right)
            assert reward == 1
        else:
            bad = wrong if function != 3 else right | {"target": (enemy + 1) % 5}
            observation, reward, terminated, _, info = env.step(bad)
            assert reward == 0
        assert terminated == (step % 8 == 0)
        assert env.observation_space.contains(observation)
        if terminated:
            observation, info = env.reset()
    assert seen == {1, 2, 3}
    env.reset(seed=1)
    assert env.step({"function": 0, "place": np.array([0, 0]), "target": 0})[1] == 0


def test_orders_are_obeyed_at_the_cell_of_their_colour() -> None:
    env = OrderEnv(size=3)
    observation, _ = env.reset(seed=0)
    orders = set()
    for _ in range(20):
        orders.add(observation["order"])
        right = np.argwhere(observation["screen"][observation["order"]])[0]
        observation, reward, *_ = env.step(right)
        assert reward == 1
        wrong = np.argwhere(observation["screen"][(observation["order"] + 1) % 3])[0]
        observation, reward, *_ = env.step(wrong)
        assert reward == 0
    assert orders == {0, 1, 2}
