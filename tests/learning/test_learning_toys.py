"""Every agent solves toys within seconds; each toy fails an agent with one real bug (see the comments)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ludus


def learn(tmp_path: Path, environment: str, agent: str, nb_step: int, settings: dict[str, Any]) -> float:
    """Train and return the best mean return of an evaluation."""
    quick = {
        "runs": str(tmp_path),
        "quiet": True,
        "evaluation.episodes": 50,
        "checkpoint_every": 0,
        "evaluation.every": 2_000,
    }
    result = ludus.train(environment, agent, nb_step=nb_step, preset="none", settings=quick | settings)
    assert result.best is not None
    return result.best


TOY = "ludus.environments.toy:"
FAST_PPO = {"agent.rollout": 32, "agent.epochs": 8, "agent.learning_rate": 2e-3, "agent.gamma": 0.95}
FAST_A2C = {"agent.rollout": 8, "agent.learning_rate": 5e-3, "agent.gamma": 0.95, "agent.optimizer": "adam"}
