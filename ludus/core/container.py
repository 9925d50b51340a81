"""The interface of containers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Container(ABC):
    """Holds all application state and runs the training loop."""

    @abstractmethod
    def run(self, nb_step: int, initial_step: int = 0) -> Self:
        """Train until ``nb_step`` environment steps, counted from ``initial_step``."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; may be called twice."""
