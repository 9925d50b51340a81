"""Ludus: reinforcement learning in PyTorch. Importing it is cheap: names load what they need when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ludus.containers.player import Player, load
    from ludus.containers.train import TrainResult, resume, train
    from ludus.core.errors import UserError

__version__ = "0.1.0"
__all__ = ["Player", "TrainResult", "UserError", "load", "resume", "train"]

_HOMES = {
    "Player": "ludus.containers.player",
    "TrainResult": "ludus.containers.train",
    "UserError": "ludus.core.errors",
    "load": "ludus.containers.player",
    "resume": "ludus.containers.train",
    "train": "ludus.containers.train",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ludus' has no attribute {name!r}")
