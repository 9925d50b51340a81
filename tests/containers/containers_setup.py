"""Small real runs for the tests in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ludus
from ludus.containers.build import build_agent, build_evaluator, build_manager
from ludus.containers.hook import OnUpdate
from ludus.containers.local import LocalWorker
from ludus.containers.updater import LocalUpdater
from ludus.core.types import State
from ludus.runs import checkpoint as checkpoints
from ludus.runs.folder import RunDirectory
from ludus.runs.train import TrainResult
from ludus.settings.settings import resolve_settings

TOY = "ludus.environments.toy:"
COUNTING = TOY + "CountingEnv"
SMALL: dict[str, Any] = {
    "network.hidden": (8,),
    "network.lstm_size": 4,
    "env.num": 4,
    "threads": 1,
    "evaluation.every": 0,
    "evaluation.episodes": 4,
}
UNSCALED: dict[str, Any] = {"agent__normalize_observation": False, "agent__normalize_reward": False}


def small(agent: Any) -> dict[str, Any]:
    """Settings of a run of moments; those that learn from rollouts have short ones."""
    return SMALL | (
        {"agent.rollout": 8}
        if agent in ("ppo", "a2c", "vtrace", "trpo", "pqn") or ":" in str(agent) or not isinstance(agent, str)
        else {}
    )


def make_worker(environment: str, agent: str = "ppo", on_update: OnUpdate | None = None, **changes: Any) -> LocalWorker:
    """A worker that reports to nobody; keys of ``changes`` have ``__`` for dots."""
    torch.set_num_threads(1)
    settings = resolve_settings(environment, agent, "none", None, small(agent) | dotted(changes)).settings
    manager = build_manager(settings)
    made = build_agent(settings, manager.observation, manager.action, torch.device("cpu"))
    manager.set_action_transform(made.action_transform)
    updater, evaluator = LocalUpdater(made), build_evaluator(settings, made)
    return LocalWorker(settings, made, manager, updater, evaluator, on_update)


def train(
    folder: Path, environment: Any, agent: Any = "ppo", on_update: OnUpdate | None = None, **changes: Any
) -> TrainResult:
    """A whole run in ``folder``."""
    settings = small(agent) | {"runs": str(folder), "quiet": True, "nb_step": 100} | dotted(changes)
    return ludus.train(environment, agent, preset="none", settings=settings, on_update=on_update)


def saved(run: Path, checkpoint: str = "latest") -> State:
    """What a checkpoint of a run holds."""
    directory = RunDirectory(run)
    folder = directory.best_checkpoint() if checkpoint == "best" else directory.latest_checkpoint()
    assert folder is not None
    return checkpoints.load(folder)[0]


def dotted(changes: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in changes.items()}
