"""A trained policy in the user's hands: it acts as training left it, on one observation or on many."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from containers_setup import COUNTING, SMALL, TOY, UNSCALED, dotted, make_worker, saved, train

import ludus
from ludus.containers.build import build_agent
from ludus.core.agent import Agent
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.step import EnvStep
from ludus.environments.image_toy import CatchEnv
from ludus.environments.toy import CountingEnv, MaskedEnv, MixedActionEnv, TargetEnv
from ludus.logging.metrics import read_metrics
from ludus.runs.folder import RunDirectory
from ludus.runs.initialise import initialise_from
from ludus.runs.policy import Player
from ludus.runs.train import TrainResult

LSTM: dict[str, Any] = {"network__body": "lstm"}
QUICK: dict[str, Any] = {
    "agent__learning_rate": 1e-2,
    "agent__epochs": 4,
}  # far from the first policy within a few updates


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainResult]:
    """Runs that several tests look at."""
    folder = tmp_path_factory.mktemp("runs")
    normalized: dict[str, Any] = {"agent__normalize_observation": True, "agent__normalize_reward": True}
    return {
        "plain": train(folder, "CartPole-v1", nb_step=300, evaluation__every=60, **UNSCALED, **QUICK),
        "lstm": train(folder, "CartPole-v1", nb_step=300, **LSTM, **QUICK),
        "normalized": train(folder, "CartPole-v1", nb_step=300, **normalized, **QUICK),
        "masked": train(folder, TOY + "MaskedEnv"),
        "masked by info": train(folder, TOY + "MaskedEnv", env__options=("in_info=true",)),
        "mixed": train(folder, TOY + "MixedActionEnv", env__options=("more=true",)),
        "target": train(folder, TOY + "TargetEnv"),
    }


def rebuilt(player: Player, run: Path, checkpoint: str) -> Agent:
    """The agent of a run, from its checkpoint, without the player."""
    world = player.environment()
    agent = build_agent(player.settings, world.observation, world.action, torch.device("cpu"))
    agent.load_state_dict(saved(run, checkpoint)["agent"])
    agent.track_critic_state()
    world.close()
    return agent


def env_step(observations: Any, first: Any = False) -> EnvStep:
    x = torch.as_tensor(np.asarray(observations, np.float32))
    none = torch.zeros(len(x), dtype=torch.bool)
    begins = torch.as_tensor(np.broadcast_to(first, (len(x),)).copy())
    return EnvStep({"observation": x}, torch.zeros(len(x)), none, none, begins, ~begins)


def observations(steps: int, rows: int = 1, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, 1, (steps, rows, 4)).astype(np.float32)


@pytest.mark.parametrize("checkpoint", ["best", "latest"])
@pytest.mark.parametrize("name", ["plain", "normalized"])
def test_it_acts_as_the_agent_does(runs: dict[str, TrainResult], name: str, checkpoint: str) -> None:
    player = ludus.load(runs[name].run, checkpoint)
    agent = rebuilt(player, runs[name].run, checkpoint)
    batch = observations(1, 64)[0]
    expected = agent.act(env_step(batch), HiddenState()).action["action"].numpy()
    assert 0 < expected.sum() < 64
    np.testing.assert_array_equal(player.act(batch), expected)
    singles = [player.act(row) for row in batch]
    np.testing.assert_array_equal(singles, expected)
    assert {np.shape(action) for action in singles} == {()}


def test_best_and_latest_are_different_checkpoints(runs: dict[str, TrainResult]) -> None:
    run = runs["plain"].run
    best, latest = ludus.load(run), ludus.load(run, "latest")
    scores = {x["step"]: x["evaluation/mean"] for x in read_metrics(run / "metrics.jsonl") if "evaluation/mean" in x}
    assert best.meta["score"] == max(scores.values()) == scores[best.meta["step"]]
    assert latest.meta["step"] == runs["plain"].steps
    for player, name in ((best, "best"), (latest, "latest")):
        for key, x in saved(run, name)["agent"].items():
            assert torch.equal(player.agent.state_dict()[key], x)
    with pytest.raises(UserError, match='"newest" is not a checkpoint: choose best, latest or'):
        ludus.load(run, "newest")


def test_a_recurrent_policy_remembers_until_told_otherwise(runs: dict[str, TrainResult]) -> None:
    player = ludus.load(runs["lstm"].run)
    agent = rebuilt(player, runs["lstm"].run, "best")
    first = np.array([[True, True], [False, False], [False, True], [False, False], [True, False]])
    state = agent.initial_state(2)
    for x, begins in zip(observations(5, 2), first, strict=True):
        said = agent.act(env_step(x, begins), state)
        state = said.state
        np.testing.assert_array_equal(player.act(x, first=begins), said.action["action"].numpy())
        for name in state:
            torch.testing.assert_close(player._state[name], state[name])


def test_what_came_before_matters_to_a_recurrent_policy_and_reset_forgets_it(runs: dict[str, TrainResult]) -> None:
    player = ludus.load(runs["lstm"].run)
    x = observations(6)[:, 0]

    def memory_after(*rows: int) -> torch.Tensor:
        for row in rows:
            player.act(x[row])
        return torch.cat([t.flatten() for t in player._state.values()])

    once = memory_after(5)  # a new player begins an episode without being told
    player.reset()
    assert not torch.equal(memory_after(0, 1, 5), once)
    player.reset()
    assert torch.equal(memory_after(5), once)
    memory_after(1, 2)
    player.act(x[5], first=True)
    assert torch.equal(memory_after(), once)
    player.act(np.stack([x[5], x[0]]))  # another number of rows: other episodes
    torch.testing.assert_close(torch.cat([t[:1].flatten() for t in player._state.values()]), once)


def test_evaluation_leaves_the_players_memory_alone(runs: dict[str, TrainResult]) -> None:
    player = ludus.load(runs["lstm"].run)
    player.act(observations(1)[0, 0])
    before = {name: x.clone() for name, x in player._state.items()}
    player.evaluate(4)
    assert all(torch.equal(before[name], x) for name, x in player._state.items())


def test_the_normalizer_is_inside_and_does_not_move(runs: dict[str, TrainResult]) -> None:
    player = ludus.load(runs["normalized"].run, "latest")
    trained = saved(runs["normalized"].run)["agent"]
    names = [name for name in trained if name.startswith("normalizer.")]
    assert names
    assert trained[next(name for name in names if name.endswith("count"))] > 100
    for x in observations(20, 8, seed=3) * 100:
        player.act(x, greedy=False)
    player.evaluate(4)
    state = player.agent.state_dict()
    assert all(torch.equal(state[name], trained[name]) for name in names)


def step_through(player: Player, env: gymnasium.Env[Any, Any], greedy: bool) -> list[Any]:
    actions = []
    observation, info = env.reset(seed=3)
    for _ in range(30):
        actions.append(player.act(observation, info, greedy=greedy))
        assert env.action_space.contains(actions[-1]), actions[-1]
        observation, _, terminated, truncated, info = env.step(actions[-1])
        if terminated or truncated:
            observation, info = env.reset()
            player.reset()
    return actions


@pytest.mark.parametrize("greedy", [True, False])
def test_actions_come_in_the_environments_own_format(runs: dict[str, TrainResult], greedy: bool) -> None:
    mixed = step_through(ludus.load(runs["mixed"].run), MixedActionEnv(more=True), greedy)
    assert mixed[0].keys() == {"choice", "amount", "switches", "dials"}
    target = step_through(ludus.load(runs["target"].run), TargetEnv(), greedy)
    assert (np.abs(target) > 1).any() or greedy  # rescaled to the Box of ±2, not left at ±1
    assert target[0].dtype == np.float32


@pytest.mark.parametrize("in_info", [False, True])
def test_masks_come_from_observation_or_info(runs: dict[str, TrainResult], in_info: bool) -> None:
    player = ludus.load(runs["masked by info" if in_info else "masked"].run)
    env = MaskedEnv(in_info=in_info)
    observation, info = env.reset(seed=0)
    for greedy in (True, False) * 10:
        mask = (info if in_info else observation)["action_mask"]
        action = player.act(observation, info, greedy=greedy)
        assert mask[action]
        observation, _, terminated, _, info = env.step(action)
        if terminated:
            observation, info = env.reset()


def test_a_batch_has_a_mask_per_row(runs: dict[str, TrainResult]) -> None:
    shown = np.zeros((10, 10), np.float32)
    only = np.eye(10, dtype=np.int8)  # one choice is left to each row
    by_info = ludus.load(runs["masked by info"].run).act(shown, {"action_mask": only})
    by_observation = ludus.load(runs["masked"].run).act({"observation": shown, "action_mask": only})
    assert by_info.tolist() == by_observation.tolist() == list(range(10))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_observation_that_is_not_finite_is_refused_by_name(runs: dict[str, TrainResult], bad: float) -> None:
    policy = ludus.load(runs["plain"].run)
    with pytest.raises(UserError, match=r'The observation "observation" has a NaN or Inf at \[2\]'):
        policy.act(np.array([0, 0, bad, 0], np.float32))
    with pytest.raises(UserError, match=r"NaN or Inf at \[1, 0\]"):
        policy.act(np.array([[0, 0, 0, 0], [bad, 0, 0, 0]], np.float32))


def test_a_missing_mask_and_a_wrong_shape_are_said_in_one_sentence(runs: dict[str, TrainResult]) -> None:
    with pytest.raises(UserError, match=r'"action_mask" in info: .* policy.act\(observation, info\)\.$'):
        ludus.load(runs["masked by info"].run).act(np.zeros(10, np.float32))
    for shown in (np.zeros(10, np.float32), np.zeros((2, 10), np.float32)):
        with pytest.raises(UserError, match=r'the observation lacks the action mask "action_mask"; give it too\.$'):
            ludus.load(runs["masked"].run).act({"observation": shown})
    with pytest.raises(UserError, match=r"has shape \(5,\); give \(4,\), or a batch"):
        ludus.load(runs["plain"].run).act(np.zeros(5, np.float32))


def test_lists_and_other_dtypes_are_taken(runs: dict[str, TrainResult]) -> None:
    player = ludus.load(runs["plain"].run)
    x = observations(1)[0, 0]
    assert (
        player.act(x) == player.act(x.tolist()) == player.act(x.astype(np.float64)) == player.act(torch.from_numpy(x))
    )


def test_numbers_that_the_integers_of_a_space_cannot_hold_are_refused(tmp_path: Path) -> None:
    image = CatchEnv(size=12).reset(seed=0)[0]
    player = train(tmp_path, partial(CatchEnv, size=12), nb_step=32).load("latest")
    expected = player.act(image)
    for same in (image.astype(np.float32), image.astype(np.int64), image.tolist()):
        assert player.act(same) == expected
    for look in (player.act, player.value, player.distribution):
        for wrong in (image / 255.0 * 0.5, image.astype(np.int64) + 1, image.astype(np.int32) - 1, image * np.nan):
            with pytest.raises(UserError, match=rf'"observation" is {wrong.dtype} and has .* its space is uint8: give'):
                look(wrong)
        with pytest.raises(UserError, match="from 0 to 255"):
            look(np.stack([image, image]).astype(np.int64) * 2)  # a batch


def test_greedy_by_default_and_chance_where_asked(runs: dict[str, TrainResult]) -> None:
    x = observations(1, 1)[0, 0]
    player, again = ludus.load(runs["target"].run), ludus.load(runs["target"].run)
    greedy = [player.act(x[:2]) for _ in range(5)]
    assert all(np.array_equal(greedy[0], action) for action in greedy)
    drawn = [player.act(x[:2], greedy=False) for _ in range(5)]
    assert len({action.tobytes() for action in drawn}) == 5
    np.testing.assert_array_equal(drawn, [again.act(x[:2], greedy=False) for _ in range(5)])
    np.testing.assert_array_equal(player.act(x[:2]), greedy[0])


def test_chance_does_not_repeat_itself_in_the_next_episode(runs: dict[str, TrainResult]) -> None:
    player = ludus.load(runs["target"].run)
    x = observations(1, 1)[0, 0, :2]
    drawn = []
    for _ in range(3):
        player.reset()
        drawn.append(np.stack([player.act(x, greedy=False) for _ in range(4)]).tobytes())
    assert len(set(drawn)) == 3


def test_an_evaluation_of_a_run(runs: dict[str, TrainResult]) -> None:
    player = ludus.load(runs["plain"].run)
    first = player.evaluate(8, seed=1)
    assert len(first.returns) == len(first.lengths) == 8
    assert first.returns == [float(n) for n in first.lengths]  # CartPole pays 1 per step
    assert first == player.evaluate(8, seed=1)
    assert first != player.evaluate(8, seed=2)
    assert first != player.evaluate(8, seed=1, greedy=False)
    assert first.mean == pytest.approx(float(np.mean(first.returns)))
    assert first.std == pytest.approx(float(np.std(first.returns)))


def test_a_whole_episode_in_the_players_own_environment(runs: dict[str, TrainResult]) -> None:
    """What ``ludus play`` does; the same policy in Gymnasium's own environment lives as long from the same start."""
    player = ludus.load(runs["lstm"].run)
    world = player.environment()
    step = world.reset(7)
    env = gymnasium.make("CartPole-v1")
    env.reset()
    env.unwrapped.state = step.observation["observation"][0].double().numpy()  # type: ignore[attr-defined]
    observation, length = step.observation["observation"][0].numpy().copy(), 0
    player.reset()
    while True:
        action = player.act(observation)
        observation, _, terminated, truncated, _ = env.step(action)
        step = world.step({"action": torch.tensor([action])})
        length += 1
        np.testing.assert_allclose(step.observation["observation"][0], observation, rtol=1e-4, atol=1e-5)
        if terminated or truncated:
            break
    assert [episode.length for episode in world.episodes()] == [length]
    world.close()


def test_a_result_and_latest_lead_to_the_same_policy(tmp_path: Path) -> None:
    result = train(tmp_path, COUNTING)
    x = np.array([[1, 2], [3, 4]], np.float32)
    expected = result.load().act(x)
    for player in (ludus.load("latest", runs=str(tmp_path)), ludus.load(str(result.run)), ludus.load(result.run)):
        np.testing.assert_array_equal(player.act(x), expected)
    with pytest.raises(UserError, match="does not exist"):
        ludus.load(tmp_path / "none")


def test_a_class_of_ones_own_is_found_again(tmp_path: Path) -> None:
    result = train(tmp_path, CountingEnv)
    assert result.load().evaluate(2).returns == [15, 15]


def test_any_callable_makes_environments(tmp_path: Path) -> None:
    for make in (partial(CountingEnv, length=3), lambda: CountingEnv(3)):
        assert train(tmp_path, make).best == 6


def test_the_policy_of_any_callables_environment_acts(tmp_path: Path) -> None:
    for make in (partial(CountingEnv, length=3), lambda: CountingEnv(3)):
        assert train(tmp_path, make).load().act(np.zeros(2, np.float32)) in (0, 1)


SCRIPT = """
import numpy as np, ludus
from ludus.environments.toy import CountingEnv

class Mine(CountingEnv):
    pass

print("ran")
small = {"quiet": True, "env.num": 2, "agent.rollout": 4, "agent.minibatches": 1, "evaluation.episodes": 2}
result = ludus.train(Mine, nb_step=8, settings=small)
print(result.load().act(np.zeros(2, np.float32)) in (0, 1))
"""


def test_a_script_with_a_class_of_its_own_runs_once(tmp_path: Path) -> None:
    """Loading finds the class in the script that runs, which needs no ``if __name__ == ...`` for it."""
    (tmp_path / "my_script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "my_script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ran", "True"]


FROZEN: dict[str, Any] = {"agent__learning_rate": 1e-30}  # too small a step to show in float32


def test_fine_tuning_starts_from_the_weights_of_a_run(runs: dict[str, TrainResult], tmp_path: Path) -> None:
    source = str(runs["normalized"].run)
    changes: dict[str, Any] = {
        "agent__normalize_observation": True,
        "agent__normalize_reward": True,
        "env__num": 2,
        "seed": 9,
    }
    tuned = train(tmp_path, "CartPole-v1", init_from=source, **changes, **FROZEN)
    before, after = saved(Path(source), "best")["agent"], saved(tuned.run)["agent"]
    weights = [name for name in before if name.startswith(("networks.", "policy."))]
    assert all(torch.equal(before[name], after[name]) for name in weights)
    count = next(name for name in before if name.startswith("normalizer.") and name.endswith("count"))
    for kind in (count, "reward_scaler.statistics.count"):  # the normalizers go on from where they were
        assert after[kind] == before[kind] + tuned.steps
    other = train(tmp_path, "CartPole-v1", "a2c", init_from=source, agent__normalize_observation=True, **FROZEN)
    assert all(torch.equal(before[name], saved(other.run)["agent"][name]) for name in weights)


def test_fine_tuning_learns(runs: dict[str, TrainResult], tmp_path: Path) -> None:
    tuned = train(tmp_path, "CartPole-v1", init_from=str(runs["plain"].run), **UNSCALED)
    before, after = saved(runs["plain"].run, "best")["agent"], saved(tuned.run)["agent"]
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("weight"))


NETWORKS: dict[str, tuple[dict[str, Any], str]] = {
    "one layer": ({"network__hidden": (9,)}, "network.hidden is 8 in that run and 9 here"),
    "layers": ({"network__hidden": (8, 8)}, "network.hidden is 8 in that run and 8 8 here"),
    "memory": (LSTM, "network.body is auto in that run and lstm here"),
    "trunk": ({"network__shared": "yes"}, "network.shared is no in that run and yes here"),
    "normalizer": ({"agent__normalize_observation": True}, "agent.normalize_observation is False in that run and True"),
    "environment": ({"environment": "Acrobot-v1"}, "env.id is CartPole-v1 in that run and Acrobot-v1 here"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_another_network_is_refused_by_the_setting_that_differs(
    runs: dict[str, TrainResult], name: str, tmp_path: Path
) -> None:
    changes, said = NETWORKS[name]
    source = str(runs["plain"].run)
    with pytest.raises(UserError, match=r"^init_from is [^\n]*$") as caught:
        train(
            tmp_path,
            **({"environment": "CartPole-v1"} | UNSCALED | changes),
            init_from=source,
            agent__learning_rate=0.1,
        )
    assert said in str(caught.value)
    assert "has shape" in str(caught.value)
    assert not any(tmp_path.iterdir())
    worker = make_worker(**({"environment": "CartPole-v1"} | UNSCALED | changes))
    weights = {name: x.clone() for name, x in worker.agent.state_dict().items()}
    with pytest.raises(UserError):
        initialise_from(worker.agent, replace(worker.settings, init_from=source, runs=str(tmp_path)))
    assert all(torch.equal(x, weights[name]) for name, x in worker.agent.state_dict().items())  # all or nothing
    worker.close()


def test_an_environment_without_a_name_is_asked_for(tmp_path: Path) -> None:
    result = train(tmp_path, lambda: CountingEnv(3))
    with pytest.raises(UserError, match="environment=make"):
        ludus.load(result.run)
    assert ludus.load(result.run, environment=lambda: CountingEnv(3)).act(np.zeros(2, np.float32)) in (0, 1)


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'^The run "nowhere" does not exist: [^\n]*$'):
        train(tmp_path, COUNTING, init_from="nowhere")
    assert not any(tmp_path.iterdir())


class Failing(CountingEnv):
    def step(self, action: Any) -> Any:
        raise ArithmeticError("mine")


def test_a_run_that_learned_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="step raised ArithmeticError: mine"):
        train(tmp_path, f"{__name__}:Failing")
    assert list(tmp_path.glob("*/*")) == []


def test_a_run_without_a_checkpoint_is_said_so(tmp_path: Path) -> None:
    result = train(tmp_path, "CartPole-v1")
    for folder in ("best", "checkpoints"):
        shutil.rmtree(result.run / folder)
    with pytest.raises(UserError, match=r"checkpoints of the run .* were deleted: restore them"):
        ludus.load("latest", runs=str(tmp_path))
    run = RunDirectory(result.run)
    run.saved_once.unlink()  # as after a kill before the first save
    for checkpoint in ("best", "latest", "step_8"):
        with pytest.raises(UserError, match=f"has no checkpoint yet: continue it with `ludus resume {run.path}`, or"):
            ludus.load("latest", checkpoint, runs=str(tmp_path))
    with run.lock(), pytest.raises(UserError, match="has no checkpoint yet: let it train until its first save, or ch"):
        ludus.load("latest", runs=str(tmp_path))


def test_the_settings_of_a_run_are_those_of_its_player(runs: dict[str, TrainResult]) -> None:
    settings = ludus.load(runs["lstm"].run).settings
    assert settings.network.lstm_size == SMALL["network.lstm_size"]
    assert (settings.network.body, settings.agent.epochs) == ("lstm", dotted(QUICK)["agent.epochs"])
    assert RunDirectory(runs["lstm"].run).config.is_file()


def test_an_observation_of_another_structure_is_told(runs: dict[str, TrainResult], tmp_path: Path) -> None:
    policy = train(tmp_path, TOY + "MaskedEnv").load()
    with pytest.raises(UserError, match=r"lacks a part of observation"):
        policy.act({"sight": np.zeros(3)})
