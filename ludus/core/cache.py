"""The interfaces of experience caches: what is written while stepping, and what is read before learning."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors


class Unroll(NamedTuple):
    """T steps of some rows, as a worker submits them: views of its memory, valid until its next write."""

    tensors: Tensors  # observation/…, first, action/…, reward, … [T or T+1, B, …]; state/… and last_state/… [B, …]
    rows: Rows
    version: int  # of the weights that acted


class CacheWriter(ABC):
    """Written while stepping."""

    version = 0  # of the weights that act, where another process learns them

    @abstractmethod
    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        """Take a step of environments (rows from ``start`` on), and the hidden state before the agent acts on it.

        ``final_value`` is what ``Agent.final_value`` gave for ``step.final``.
        """

    @abstractmethod
    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """Take the agent's answer to the step that these rows had last."""

    @abstractmethod
    def accepts(self, start: int) -> bool:
        """Whether the rows from ``start`` on may step again before it is time to learn, or to submit."""

    @abstractmethod
    def amend(self, step: EnvStep) -> None:
        """Take the last step of all rows again: after a resume, some may have begun new episodes instead."""

    def submit(self) -> Unroll:
        """Give what was written to whoever learns from it; the next write begins another unroll."""
        raise UserError(f"A {type(self).__name__} cannot be submitted by a worker; use acer_vtrace, ppo or a2c.")


class CacheReader(ABC):
    """Read before learning."""

    on_warning: Callable[[str], object] = staticmethod(warnings.warn)  # told what a user should know

    @abstractmethod
    def ready(self) -> bool:
        """Whether it is time to learn."""

    @abstractmethod
    def read(self) -> Batch:
        """The next batch; valid until the next write."""

    def feedback(self, index: Tensor, priority: Tensor) -> None:
        """Take new priorities for what was read; a cache without priorities ignores them."""
        return

    def receive(self, unroll: Unroll) -> None:
        """Copy what a worker submitted; the columns of a batch are filled in the order in which unrolls come."""
        raise UserError(f"A {type(self).__name__} takes no unrolls of workers; use acer_vtrace, ppo or a2c.")

    def schedule(self, progress: float) -> None:
        """Set what follows the share of the run that is done (0 to 1)."""
        return

    def metrics(self) -> dict[str, float]:
        """Numbers for the log."""
        return {}


class ExperienceCache(CacheWriter, CacheReader):
    """Both in one: where the process that steps learns too."""

    def accepts(self, start: int) -> bool:
        return not self.ready()

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...
