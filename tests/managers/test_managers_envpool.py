from __future__ import annotations

import math

import pytest
import torch

from ludus.environments.config import EnvConfig
from ludus.managers.make import make_manager

pytest.importorskip("envpool")


def pool(id, num=4, **settings):
    return make_manager(EnvConfig(id=id, num=num, backend="envpool", **settings))


def run(manager, seed, steps, choices):
    """Take random steps; return the steps and the endings before each."""
    generator = torch.Generator().manual_seed(0)
    step = manager.reset(seed)
    assert step.first.all()
    seen = [step.observation["observation"].clone()]
    ended = torch.zeros(manager.batch, dtype=torch.bool)
    for _ in range(steps):
        step = manager.step({"action": torch.randint(0, choices, (manager.batch,), generator=generator)})
        assert torch.equal(step.first, ended)
        assert (step.reward[step.first] == 0).all()
        assert not (step.terminated | step.truncated)[step.first].any()
        ended = step.terminated | step.truncated
        seen.append(step.observation["observation"].clone())
    return torch.stack(seen)


def test_cartpole_resets_at_the_step_after_an_ending():
    manager = pool("CartPole-v1", max_episode_steps=20)
    seen = run(manager, 1, 200, 2)
    episodes = manager.episodes()
    assert max(e.length for e in episodes) == 20
    assert all(e.reward == e.length for e in episodes)
    assert all(e.seed is None for e in episodes)
    assert torch.equal(seen, run(manager, 1, 200, 2))
    assert not torch.equal(seen, run(manager, 2, 200, 2))
    assert not torch.equal(seen[0, 0], seen[0, 1])  # each row has a seed of its own
    manager.close()
    manager.close()


def test_lunar_lander():
    manager = pool("LunarLander-v3")
    spec = manager.observation["observation"]
    assert (spec.shape, spec.low, spec.high) == ((8,), float("-inf"), float("inf"))  # EnvPool says [1e-38, 3e38]
    run(manager, 0, 400, 4)
    episodes = manager.episodes()
    assert len(episodes) > 4
    assert all(e.reward < 100 and e.length > 20 for e in episodes)


def test_pong_gives_stacked_bytes():
    manager = pool("Pong-v5", num=2)
    spec = manager.observation["observation"]
    assert (spec.shape, spec.dtype, spec.stack, manager.action["action"].sizes) == ((4, 84, 84), "uint8", 4, (6,))
    step = manager.reset(0)
    for _ in range(5):
        step = manager.step({"action": torch.tensor([2, 3])})
    assert step.observation["observation"].shape == (2, 4, 84, 84)
    assert step.observation["observation"].float().std() > 1


def test_continuous_actions_and_wide_floats():
    manager = pool("Pendulum-v1", num=2)
    manager.set_action_transform({"action": "clip"})
    manager.reset(0)
    step = manager.step({"action": torch.tensor([[9.0], [-9.0]])})
    assert (step.reward < 0).all()
    assert step.reward.dtype == torch.float32


def test_an_episode_that_terminates_at_its_time_limit_is_not_truncated():
    """EnvPool reports 22 of the 58 terminations here as truncated."""
    manager = pool("CartPole-v1", num=8, max_episode_steps=12)
    generator = torch.Generator().manual_seed(0)
    manager.reset(0)
    length, at_limit, lengths = torch.zeros(8), 0, set()
    for _ in range(600):
        step = manager.step({"action": torch.randint(0, 2, (8,), generator=generator)})
        length = torch.where(step.first, 0, length + 1)
        x, angle = step.observation["observation"][:, 0], step.observation["observation"][:, 2]
        fell = (x.abs() > 2.4) | (angle.abs() > 12 * 2 * math.pi / 360)
        assert torch.equal(step.terminated, fell)
        assert torch.equal(step.truncated, (length == 12) & ~fell)
        at_limit += int((fell & (length == 12)).sum())
        lengths |= set(length.tolist())
    assert at_limit > 20
    assert max(lengths) == 12
    assert {e.length for e in manager.episodes()} <= set(range(8, 13))
    manager.close()


def test_rows_truncated_here_start_new_episodes():
    manager = pool("MountainCar-v0", num=3, max_episode_steps=5)
    manager.reset(0)
    for t in range(1, 19):
        step = manager.step({"action": torch.tensor([0, 1, 2])})
        assert step.truncated.tolist() == [t % 6 == 5] * 3
        assert step.first.tolist() == [t % 6 == 0] * 3
        if t % 6 == 0:
            assert (step.observation["observation"][:, 1] == 0).all()  # at rest
    manager.close()


@pytest.mark.parametrize(("id", "limit"), [("FrozenLake-v1", 6), ("Hopper-v4", 18)])
def test_both_endings_occur_at_the_limit_and_never_together(id, limit):
    manager = pool(id, num=6, max_episode_steps=limit)
    continuous = manager.action["action"].kind == "continuous"
    manager.set_action_transform({"action": "clip"} if continuous else {})
    generator = torch.Generator().manual_seed(0)
    manager.reset(0)
    length, endings = torch.zeros(6), set()
    for _ in range(400):
        drawn = torch.rand(6, manager.action["action"].size, generator=generator)
        step = manager.step({"action": 2 * drawn - 1 if continuous else (4 * drawn[:, 0]).long()})
        length = torch.where(step.first, 0, length + 1)
        assert (length <= limit).all()
        last = length == limit
        endings |= set(zip(step.terminated[last].tolist(), step.truncated[last].tolist(), strict=True))
    assert endings == {(True, False), (False, True)}
    manager.close()


def test_a_game_that_is_over_at_its_time_limit_is_not_truncated():
    def play(limit):
        manager = pool("Breakout-v5", num=1, max_episode_steps=limit, options=("noop_max=1", "use_fire_reset=true"))
        manager.reset(3)
        for t in range(1, 3000):
            step = manager.step({"action": torch.tensor([t % 3 + 1])})
            if step.terminated[0] or step.truncated[0]:
                break
        manager.close()
        return t, bool(step.terminated[0]), bool(step.truncated[0])

    length, *ends = play(0)
    assert ends == [True, False]
    assert play(length) == (length, True, False)
    assert play(length - 1) == (length - 1, False, True)
