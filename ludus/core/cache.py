"""The interfaces of experience caches: written while stepping, read before learning."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors
from ludus.core.updater import Updater


class Unroll(NamedTuple):
    """T steps that a worker submits to a learner: views of its memory, valid until its next write."""

    tensors: Tensors  # observation/…, first, action/…, reward, … [T or T+1, B, …]; state/… and last_state/… [B, …]
    rows: Rows
    version: int  # of the weights that acted
    number: int = 0  # among the unrolls of these rows; where one is missing, the next does not continue the last


class CacheWriter(ABC):
    """The interface used while stepping."""

    @abstractmethod
    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        """Write a step of the rows from ``start`` on, and the hidden state before the agent acts on it.

        ``final_value`` is ``Agent.final_value`` of ``step.final``.
        """

    @abstractmethod
    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """Write the agent's actions on the last step of these rows."""

    @abstractmethod
    def accepts(self, start: int) -> bool:
        """Return whether the rows from ``start`` on may step again before the next learning or submission."""

    @abstractmethod
    def amend(self, step: EnvStep) -> None:
        """Replace the last step of all rows: after a resume, some may have started new episodes."""

    def schedule(self, progress: float) -> None:
        """Set scheduled values from the progress of the run (0 to 1)."""
        return


class UnrollWriter(CacheWriter):
    """A cache that a worker fills and submits to a learner."""

    version = 0  # of the weights that act
    length: int  # steps of an unroll

    @abstractmethod
    def submit(self) -> Unroll:
        """Return the finished unroll; the next write starts another one."""

    @abstractmethod
    def continue_from(self, last: Self) -> None:
        """Start an unroll with the last observation of ``last``, a cache on other memory that was submitted."""

    @abstractmethod
    def outline(self, rows: int) -> Tensors:
        """Return meta tensors like those of an unroll of ``rows`` rows; the cache must hold a step of some rows."""

    @abstractmethod
    def state_dict(self) -> State:
        """Return what a resumed worker needs to start its next unroll."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...


class CacheReader(ABC):
    """The interface used for learning."""

    on_warning: Callable[[str], object] = staticmethod(warnings.warn)  # called with warnings for the user
    generator: torch.Generator | None = None  # random numbers of sampling; the container seeds it
    bytes = 0  # memory of a replay when it is full
    partial = False  # whether a batch may have fewer unrolls than it has room for

    @abstractmethod
    def ready(self) -> bool:
        """Return whether a batch can be read; this is where the update ratio is enforced."""

    def agree(self, updater: Updater) -> bool:
        """Return whether all ranks are ready; caches with an update ratio first average over ranks what decides it."""
        return updater.agree(self.ready())

    @abstractmethod
    def read(self) -> Batch:
        """Return the next batch; valid until the next read or write."""

    def grant(self, reads: int) -> None:
        """Allow this many more reads without a write, for learning from recorded episodes alone."""
        raise UserError(f"A {type(self).__name__} has nothing to read without acting; set container to local.")

    def fresh(self, names: Sequence[str], with_returns: bool = False) -> tuple[Tensors, Tensor | None]:
        """Return the observations ``[n, …]`` of real steps since the last call, each as it was before its action.

        The second result is None, or ``with_returns`` the running discounted returns ``[n]`` after these steps.
        """
        raise UserError(f"A {type(self).__name__} gives no single steps; use one of ludus.experience.replay.")

    def feedback(self, index: Tensor, priority: Tensor) -> None:
        """Set new priorities of what was read; ignored by caches without priorities."""
        return

    def receive(self, unroll: Unroll) -> None:
        """Add an unroll that a worker submitted; batches are filled in order of arrival.

        A batch of a single unroll may be read from its memory, which must not change before the next unroll arrives.
        """
        raise UserError(f"A {type(self).__name__} cannot receive workers' unrolls; use vtrace, appo or acer.")

    def finish(self) -> None:
        """End the batch with the unrolls received so far, if ``partial``."""
        raise UserError(f"A {type(self).__name__} cannot end a batch early; turn off impala.dynamic.")

    @property
    def max_bytes(self) -> int:
        """An upper bound of ``bytes`` over the run."""
        return self.bytes

    @property
    def saved_within_update(self) -> bool:
        """Whether ``state_dict`` is complete in the middle of an update too."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return metrics for logging."""
        return {}


class ExperienceCache(CacheWriter, CacheReader):
    """A cache that is written and read in the same process."""

    def accepts(self, start: int) -> bool:
        return not self.ready()

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...
