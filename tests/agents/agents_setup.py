"""Real agents on real environments, small, for the tests in this folder."""

from __future__ import annotations

from typing import Any

import torch

from ludus.containers.build import build_agent, build_evaluator, build_manager
from ludus.containers.local import LocalWorker
from ludus.containers.updater import LocalUpdater
from ludus.settings.settings import resolve_settings

SMALL: dict[str, Any] = {"network.hidden": (16,), "network.lstm_size": 8, "env.num": 4}


def make_worker(environment: str, agent: str = "ppo", **changes: Any) -> LocalWorker:
    """A worker that reports to nobody; keys of ``changes`` have ``__`` for dots."""
    torch.set_num_threads(1)
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    quiet = {"evaluation.every": 0, "evaluation.episodes": 4, "nb_step": 1_000}
    rollout = {"agent.rollout": 16} if agent in ("ppo", "a2c", "vtrace", "trpo", "pqn") else {}
    settings = resolve_settings(environment, agent, "none", None, SMALL | quiet | rollout | dotted).settings
    manager = build_manager(settings)
    made = build_agent(settings, manager.observation, manager.action, torch.device("cpu"))
    manager.set_action_transform(made.action_transform)
    return LocalWorker(settings, made, manager, LocalUpdater(made), build_evaluator(settings, made))
