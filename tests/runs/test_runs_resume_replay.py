"""Exact resume with a replay inside, for every agent that has one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from containers_setup import TOY, make_worker, train
from test_runs_resume import MANAGERS, all_but_offset, assert_same_run

import ludus
from ludus.runs import open_run

pytestmark = pytest.mark.usefixtures("shared_fork_server")
SMALL: dict[str, Any] = {
    "nb_step": 360,
    "agent__replay": 200,  # it wraps
    "agent__warmup": 60,
    "agent__batch_size": 16,
    "agent__updates_per_step": 0.5,
    "evaluation__every": 100,
    "log_every": 50,
    "checkpoint_every": 90,
}
UNROLLS: dict[str, Any] = {"nb_step": 360, "agent__replay": 200, "agent__warmup": 60, "agent__rollout": 5}
SEQUENCES = {"network__body": "lstm", "agent__sequence": 6, "agent__burn_in": 3, "agent__overlap": 3}
BOX, CHOICE = "Pendulum-v1", "CartPole-v1"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dqn": (CHOICE, "dqn", {}),
    "dueling": (CHOICE, "dueling_dqn", {"agent__n_step": 3}),
    "masked": (TOY + "MaskedEnv", "rainbow", {}),
    "iqn": (CHOICE, "iqn", {"agent__normalize_reward": True}),
    "r2d2": (CHOICE, "r2d2", SEQUENCES),
    "ddpg": (BOX, "ddpg", {"agent__noise": "parameter"}),
    "td3": (BOX, "td3", {"agent__noise": "ornstein_uhlenbeck", "agent__prioritized": True}),
    "recurrent td3": (BOX, "td3", SEQUENCES | {"agent__normalize_observation": True, "agent__normalize_reward": True}),
    "sac": (BOX, "sac", {"agent__n_step": 2, "agent__normalize_observation": True}),
    "discrete sac": (CHOICE, "discrete_sac", {"agent__normalize_observation": True}),
    "acer": (CHOICE, "acer", UNROLLS),
    "recurrent acer": (CHOICE, "acer_vtrace", UNROLLS | {"network__body": "lstm"}),
}


def stop_after(name: str, value: float) -> Callable[[dict[str, float]], None]:
    """A hook that asks this process to stop, as Ctrl-C does, when a number of the log has come so far."""
    asked: list[float] = []

    def hook(values: dict[str, float]) -> None:
        if not asked and values[name] >= value:
            asked.append(value)
            signal.raise_signal(signal.SIGTERM)

    return hook


def settings_of(case: str) -> dict[str, Any]:
    own = CASES[case][2]
    if "agent__rollout" in own:
        return {key: x for key, x in SMALL.items() if not key.startswith("agent__")} | own
    return SMALL | own


ALIKE = ("dueling", "iqn", "recurrent td3", "recurrent acer")  # their state is that of other cases together


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in ALIKE else []) for case in CASES]
)
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(case: str, tmp_path: Path) -> None:
    (environment, agent, _), settings = CASES[case], settings_of(case)
    straight = train(tmp_path / "straight", environment, agent, **settings).run
    stopped = train(tmp_path / "stopped", environment, agent, stop_after("updates", 34), **settings)
    assert stopped.reason.startswith("SIG")
    assert 60 < stopped.steps < 360
    assert_same_run(straight, ludus.resume(stopped.run).run)


SOON = [("dqn", "vector"), ("acer", "vector"), ("acer", "subproc"), ("dqn", "alternate"), ("r2d2", "alternate")]
LATER = [("r2d2", "vector"), ("dqn", "subproc"), ("r2d2", "subproc"), ("acer", "alternate")]


@pytest.mark.parametrize(
    ("case", "manager"), [*SOON, *(pytest.param(*names, marks=pytest.mark.slow) for names in LATER)]
)
def test_so_it_is_with_every_manager(case: str, manager: str, tmp_path: Path) -> None:
    (environment, agent, _), settings = CASES[case], settings_of(case) | MANAGERS[manager]
    straight = train(tmp_path / "straight", environment, agent, **settings).run
    stopped = train(tmp_path / "stopped", environment, agent, stop_after("updates", 34), **settings)
    assert 60 < stopped.steps < 360
    assert_same_run(straight, ludus.resume(stopped.run).run)


def test_a_run_stopped_in_its_warm_up_goes_on_with_it(tmp_path: Path) -> None:
    settings = SMALL | {"agent__warmup": 1000, "agent__replay": 2000, "nb_step": 1200}
    straight = train(tmp_path / "straight", CHOICE, "dqn", **settings).run
    stopped = train(tmp_path / "stopped", CHOICE, "dqn", stop_after("step", 400), **settings)
    assert 400 <= stopped.steps < 1000
    assert_same_run(straight, ludus.resume(stopped.run).run)


def test_a_replay_that_is_left_out_warms_up_anew(tmp_path: Path) -> None:
    settings = SMALL | {"agent__save_replay": False}
    stopped = train(tmp_path, CHOICE, "dqn", stop_after("updates", 34), **settings)
    counters = all_but_offset(stopped.run)["counters"]
    first = ludus.resume(stopped.run)
    again = all_but_offset(first.run)["counters"]
    assert first.steps >= 360
    assert counters["updates"] == 34
    assert 0 < again["updates"] - 34 <= 0.5 * (first.steps - stopped.steps - 60) + 1


class Snow(gymnasium.Env[Any, np.int64]):
    """Random images of 36×36, which no two steps share; episodes of 9 steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (36, 36), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 9
        return self.np_random.integers(0, 256, (36, 36), np.uint8), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return self.np_random.integers(0, 256, (36, 36), np.uint8), float(action), False, self.left <= 0, {}


def test_a_replay_that_keeps_whole_stacks_comes_back_and_says_so_once(tmp_path: Path) -> None:
    stack, repeat = "FrameStackObservation(stack_size=4)", "RepeatAction(num_repeats=2)"
    wrappers = tuple(f"gymnasium.wrappers:{wrapper}" for wrapper in (stack, repeat))
    settings = SMALL | {"env__wrappers": wrappers, "nb_step": 160, "agent__replay": 100, "agent__updates_per_step": 0.2}
    straight = train(tmp_path / "straight", f"{__name__}:Snow", "dqn", **settings).run
    stopped = train(tmp_path / "stopped", f"{__name__}:Snow", "dqn", stop_after("updates", 8), **settings)
    assert 60 < stopped.steps < 160
    resumed = ludus.resume(stopped.run).run
    assert_same_run(straight, resumed)
    for run in (straight, resumed):
        assert (run / "log.txt").read_text().count("The replay stores whole stacks") == 1


def test_a_replay_with_whole_stacks_is_within_the_bound_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_run, "FIXED", 0)  # nothing to spare: the replay itself must be counted
    monkeypatch.setattr(open_run, "SNAPSHOT", 0)
    stack, repeat = "FrameStackObservation(stack_size=8)", "RepeatAction(num_repeats=2)"
    wrappers = tuple(f"gymnasium.wrappers:{wrapper}" for wrapper in (stack, repeat))
    settings = SMALL | {"evaluation__every": 0, "checkpoint_every": 0, "network__hidden": (8,)}
    settings |= {"env__wrappers": wrappers, "nb_step": 1500, "agent__replay": 1000, "agent__updates_per_step": 0.01}
    catch = "ludus.environments.image_toy:CatchEnv"
    stopped = train(tmp_path, catch, "dqn", stop_after("step", 1300), **settings)
    assert "whole stacks" in (stopped.run / "log.txt").read_text()
    assert ludus.resume(stopped.run).steps >= 1500


@pytest.mark.parametrize("agent", ["dqn", "acer"])
def test_the_bound_of_a_checkpoint_counts_the_replay(agent: str) -> None:
    small, worker = (make_worker(CHOICE, agent, agent__replay=replay) for replay in (1_000, 10_000))
    assert open_run.max_checkpoint_bytes(worker) >= open_run.max_checkpoint_bytes(small) + 2 * 90 * 1000
    small.close()
    worker.close()
