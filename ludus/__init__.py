"""Ludus: reinforcement learning in PyTorch. Public names are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; the same names as in _MODULES
    from ludus.containers.evaluate import Evaluation
    from ludus.core.agent import Agent
    from ludus.core.errors import Stop, UserError
    from ludus.core.network import Network
    from ludus.runs.policy import Player, load
    from ludus.runs.train import TrainResult, resume, train

__version__ = "0.2.0"
__all__ = [
    "Agent",
    "Evaluation",
    "Network",
    "Player",
    "Stop",
    "TrainResult",
    "UserError",
    "load",
    "resume",
    "train",
]

_MODULES = {
    "Agent": "ludus.core.agent",
    "Evaluation": "ludus.containers.evaluate",
    "Network": "ludus.core.network",
    "Player": "ludus.runs.policy",
    "Stop": "ludus.core.errors",
    "TrainResult": "ludus.runs.train",
    "UserError": "ludus.core.errors",
    "load": "ludus.runs.policy",
    "resume": "ludus.runs.train",
    "train": "ludus.runs.train",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ludus' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names and the imported packages."""
    loaded = (name for name, x in globals().items() if name.startswith("__") or isinstance(x, ModuleType))
    return sorted({*__all__, *loaded})
