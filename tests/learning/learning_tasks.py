"""What Ludus must learn, as data, and the one way in which a task is run; tests and ``benchmarks/learning.py`` share it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ludus

TOY = "ludus.environments.toy:"
LSTM = {"network.body": "lstm"}


@dataclass(frozen=True)
class Task:
    """An environment, what learns it, and the mean return of 100 fresh greedy episodes that it must reach."""

    name: str
    environment: str
    agent: str
    target: float
    nb_step: int
    seeds: int
    settings: Mapping[str, Any] = field(default_factory=dict)  # over the preset, which the environment picks
    every: int = 5_000  # steps between evaluations
    whole: bool = False  # goes on to nb_step when the target is reached, so that the final policy is measured too
    beyond: bool = False  # what no such policy can do: every evaluation must stay below the target


class Outcome(NamedTuple):
    """What came of one seed."""

    reached: int | None  # steps at the first evaluation on target
    best: float
    final: float  # the last evaluation: the first on target, unless the task goes on
    steps: int
    seconds: float

    def passes(self, task: Task) -> bool:
        """Whether the task's demand was met."""
        return (self.reached is None) == task.beyond


def run(task: Task, seed: int, runs: Path) -> Outcome:
    """Train one seed on one thread."""
    began = time.perf_counter()
    result = ludus.train(
        task.environment, task.agent, nb_step=task.nb_step, seed=seed, settings=settings_of(task, runs)
    )
    curve = evaluations(result.run)
    reached = next((step for step, mean in curve if mean >= task.target), None)
    best = max(mean for _, mean in curve)
    return Outcome(reached, best, curve[-1][1], result.steps, time.perf_counter() - began)


def settings_of(task: Task, runs: Path) -> dict[str, Any]:
    """The task's settings and those of the protocol."""
    protocol: dict[str, Any] = {
        "runs": str(runs),
        "quiet": True,
        "threads": 1,
        "checkpoint_every": 0,
        "evaluation.every": task.every,
        "evaluation.episodes": 100,
        "evaluation.greedy": True,
    }
    if not task.whole:
        protocol["evaluation.stop_at"] = task.target
    return protocol | dict(task.settings)


def evaluations(run: Path) -> list[tuple[int, float]]:
    """Steps and mean return of every evaluation of a run."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["evaluation/mean"]) for line in lines if "evaluation/mean" in line]
