"""What agents with a replay must get right, each as a toy that one certain bug makes impossible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from learning_tasks import OFF_POLICY_TOYS, UNWATCHED, Task, run_quickly

import ludus
from ludus.agents.dqn import DQN
from ludus.core.batch import Batch
from ludus.experience.replay import ExperienceReplay
from ludus.runs.train import TrainResult

OBSERVATION = np.zeros(1, np.float32)
SMALL: dict[str, Any] = UNWATCHED | {
    "env.num": 4,
    "network.hidden": (16,),
    "agent.gamma": 0.9,
    "agent.warmup": 200,
    "agent.batch_size": 64,
    "agent.learning_rate": 5e-3,
}
SETTLED = {"agent.learning_rate_schedule": "linear", "agent.target_every": 20, "agent.epsilon_end": 0.5}


class Still(gymnasium.Env[Any, Any]):
    """Looks the same at every step and pays 0.1 for it; after 5 steps it ends, or is cut if ``cut``.

    No more, because Huber's loss finds the mean of a value only where no error is larger than 1.
    """

    def __init__(self, cut: bool = True) -> None:
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._step, self._cut = 0, cut

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return OBSERVATION, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        over = self._step == 5
        return OBSERVATION, 0.1, over and not self._cut, over and self._cut, {}


class Mortal(Still):
    """The same, but it ends."""

    def __init__(self) -> None:
        super().__init__(cut=False)


class Lottery(Still):
    """One step; it pays 1 with a chance of 0.1, whatever one does."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return OBSERVATION, float(self.np_random.random() < 0.1), True, False, {}


class Cue(gymnasium.Env[Any, Any]):
    """Shows which of two answers is right at the first of 8 steps and pays for it at the last."""

    LENGTH = 8

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._step, self._cue = 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._cue = 0, int(self.np_random.integers(2))
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        over = self._step == self.LENGTH
        reward = (1.0 if int(action) == self._cue else -1.0) if over else 0.0
        return self._show(), reward, over, False, {}

    def _show(self) -> Any:
        cue = (2.0 * self._cue - 1) if self._step == 0 else 0.0
        return np.array([cue, self._step / self.LENGTH], np.float32)


def train(runs: Path, environment: Any, agent: str, nb_step: int, **more: Any) -> TrainResult:
    settings = SMALL | {"runs": str(runs)} | {key.replace("__", "."): value for key, value in more.items()}
    return ludus.train(environment, agent, nb_step=nb_step, preset="none", settings=settings)


def values_of(result: TrainResult) -> torch.Tensor:
    agent: Any = result.load("latest").agent
    start = torch.ones(1, 1, dtype=torch.bool)
    with torch.no_grad():
        outputs, _ = agent.run("q", {"observation": torch.zeros(1, 1, 1)}, agent.initial_state(1), start)
        return agent.head.q(outputs).flatten()  # type: ignore[no-any-return]


@pytest.mark.parametrize("task", OFF_POLICY_TOYS, ids=lambda task: task.name)
def test_the_toy_is_learned(task: Task, tmp_path: Path) -> None:
    outcome = run_quickly(task, tmp_path)
    assert outcome.passes(task), f"{outcome}, target {task.target:g}"


@pytest.mark.parametrize(
    ("agent", "n_step"),
    [("dqn", 3), ("qr_dqn", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("dqn", 1), ("qr_dqn", 3)))],
)
def test_a_value_looks_beyond_a_truncation(agent: str, n_step: int, tmp_path: Path) -> None:
    """It is 0.1/(1 − γ) = 1 if and only if every return is cut at the truncation and bootstraps from what it cut off.

    Taken as an end, the value would be 0.36 with one step and 0.31 with three; with rewards summed across the reset,
    whose own reward is 0, it would be 0.87 at most.
    """
    found = values_of(
        train(tmp_path, Still, agent, 5_000, agent__n_step=n_step, agent__updates_per_step=0.5, **settled())
    )
    assert found.tolist() == pytest.approx([1, 1], rel=0.05)


@pytest.mark.parametrize(
    ("n_step", "value"),
    [
        pytest.param(1, 1 / (1 - 0.9 * 0.8), marks=pytest.mark.slow),
        (3, 11.03 / 5 / (1 - 2 * 0.9**3 / 5)),
    ],
)
def test_a_value_ends_at_a_termination(n_step: int, value: float, tmp_path: Path) -> None:
    """Of 5 steps that look alike, one (four) of 5 ends within 1 (3) steps, so that 4 (2) of 5 returns bootstrap."""
    found = values_of(
        train(tmp_path, Mortal, "dqn", 5_000, agent__n_step=n_step, agent__updates_per_step=0.5, **settled())
    )
    assert found.tolist() == pytest.approx([value / 10, value / 10], rel=0.06)


@pytest.mark.parametrize("corrected", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_importance_weights_undo_the_bias_of_priorities(
    corrected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn in proportion to |δ| and not corrected, the value q of a chance p = 0.1 solves p(1−q)² = (1−p)q²: 0.25."""
    if not corrected:
        read = ExperienceReplay.read
        even = lambda self: replace(batch := read(self), weight=torch.ones_like(batch.weight))  # noqa: E731
        monkeypatch.setattr(ExperienceReplay, "read", even)
    more = {"agent__priority_exponent": 1.0, "agent__importance_exponent": 1.0, "agent__prioritized": True}
    result = train(tmp_path, Lottery, "dqn", 6_000, agent__updates_per_step=0.5, **more | settled())
    assert values_of(result).mean() == pytest.approx(0.1 if corrected else 0.25, abs=0.05)


@pytest.mark.slow
def test_a_burn_in_makes_stale_states_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored states are those of networks long gone; where a burn-in holds an episode's start, its result is exact.

    Without one, a sequence would begin with what is stored for its first step, as the last comparison does.
    """
    kept: list[tuple[DQN, Batch]] = []  # the last learning
    cache: list[ExperienceReplay] = []
    learn, make = DQN.learn, DQN.make_cache

    def keep(self: DQN, batch: Batch, updater: Any) -> Any:
        kept[:] = [(self, batch)]
        return learn(self, batch, updater)

    def remember(self: DQN, batch: int) -> ExperienceReplay:
        cache.append(make(self, batch))
        return cache[0]

    monkeypatch.setattr(DQN, "learn", keep)
    monkeypatch.setattr(DQN, "make_cache", remember)
    sequences = {"agent__sequence": 8, "agent__burn_in": 8, "agent__overlap": 0, "agent__batch_size": 32}
    memory = {"network__body": "lstm", "network__lstm_size": 16, "agent__updates_per_step": 0.125}
    result = train(tmp_path, Cue, "r2d2", 6_000, **sequences | memory, agent__n_step=3)
    assert result.evaluation is not None
    assert result.evaluation.mean > 0.9  # of 1; without a memory: 0
    (agent, batch), replay = kept[0], cache[0]
    warm = agent.burn_in_state(batch, "q")
    assert batch.index is not None
    row, slot = batch.index % replay.batch, (batch.index // replay.batch + 8) // 8 % replay._hidden.length
    seen = batch.first[:8].any(0)  # the burn-in holds a start
    blank = replace(batch, state=batch.state.map(torch.zeros_like))
    exact = agent.burn_in_state(blank, "q")
    stale = {name: replay._hidden.columns[name][row, slot] for name in warm}
    assert seen.sum() > 5
    for name, x in exact.items():
        torch.testing.assert_close(warm[name][seen], x[seen], rtol=1e-4, atol=1e-5)
        assert (stale[name][seen] - x[seen]).abs().mean() > 0.02


def settled() -> dict[str, Any]:
    return {key.replace(".", "__"): value for key, value in SETTLED.items()}
