"""The interface of experience caches."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.hidden_state import HiddenState
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State


class ExperienceCache(ABC):
    """Written after stepping, read before learning."""

    on_report: Callable[[str], object] = staticmethod(warnings.warn)  # told what a user should know

    @abstractmethod
    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        """Take a step of environments (rows from ``start`` on), and the hidden state before the agent acts on it.

        ``final_value`` is what ``Agent.final_value`` gave for ``step.final``.
        """

    @abstractmethod
    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """Take the agent's answer to the step that these rows had last."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether it is time to learn."""

    def accepts(self, start: int) -> bool:
        """Whether the rows from ``start`` on may step again before it is time to learn."""
        return not self.ready()

    @abstractmethod
    def read(self) -> Batch:
        """The next batch; valid until the next write."""

    @abstractmethod
    def amend(self, step: EnvStep) -> None:
        """Take the last step of all rows again: after a resume, some may have begun new episodes instead."""

    def feedback(self, index: Tensor, priority: Tensor) -> None:
        """Take new priorities for what was read; a cache without priorities ignores them."""
        return

    def schedule(self, progress: float) -> None:
        """Set what follows the share of the run that is done (0 to 1)."""
        return

    def report(self) -> dict[str, float]:
        """Numbers for the log."""
        return {}

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...
