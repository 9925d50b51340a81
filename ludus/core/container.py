"""The interface of containers, which hold all application state and run the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Container(ABC):
    """Holds all application state and runs the loop."""

    @abstractmethod
    def run(self, nb_step: int, initial_step: int = 0) -> Self:
        """Train until ``nb_step`` environment steps are done, counted from ``initial_step``."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; may be called twice."""
