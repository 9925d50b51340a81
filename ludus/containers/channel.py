"""The interface between a learner and its workers: unrolls one way, what acting depends on the other."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ludus.core.cache import Unroll
from ludus.core.errors import UserError
from ludus.core.step import Episode
from ludus.core.types import State, Tensors
from ludus.parallel.process import WorkerError


class ActingState(NamedTuple):
    """What workers act with, published by the learner."""

    version: int  # increases with every publication
    progress: float  # share of the run that is done, 0 to 1, for schedules
    tensors: Tensors  # ``Agent.acting_state``


class Report(NamedTuple):
    """What a worker reports with an unroll."""

    steps: int  # real environment steps of the unroll
    episodes: list[Episode]  # that ended in it
    warnings: list[str]  # for the user
    seconds: dict[str, float]  # time by phase, since the last report


class Delivery(NamedTuple):
    """An unroll that has arrived."""

    worker: int
    unroll: Unroll
    report: Report


class HostChannel(ABC):
    """The learner's end of a channel. It also starts the workers, and replaces those that fail."""

    restarts = 0  # workers replaced so far
    copies = 0  # of an unroll on its way from a worker's memory to ``receive``
    incarnations: list[int]  # of each worker: how often it was replaced; its seeds depend on that
    on_warning: Callable[[str], object] = staticmethod(warnings.warn)  # called with messages for the user

    @abstractmethod
    def start(self, states: Sequence[State | None]) -> list[str]:
        """Start the workers, each in a saved state or with new episodes; they act after the next ``publish``.

        Return how the environments of each were restored; "" for new episodes.
        """

    @abstractmethod
    def publish(self, state: ActingState) -> None:
        """Make a new version available to all workers, which use it from their next unroll on."""

    @abstractmethod
    def receive(self, worker: int | None = None) -> Delivery:
        """Wait for the next unroll, in order of arrival, or for the next one of a worker."""

    @abstractmethod
    def release(self, delivery: Delivery) -> None:
        """Let the worker write to the memory of an unroll again; each worker's unrolls are released in order."""

    @abstractmethod
    def queued(self) -> int:
        """Return the number of unrolls that have arrived and were not received."""

    @abstractmethod
    def save(self) -> list[State | None]:
        """Return the state of each worker at the end of an unroll; None for one that failed meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """End the workers and release everything; may be called twice."""


class WorkerChannel(ABC):
    """A worker's end of a channel."""

    memory: Sequence[Tensors | None]  # for the unrolls of each slot; None: the worker allocates it

    @abstractmethod
    def next_slot(self, state: Callable[[], State]) -> int:
        """Wait until a slot may be written, and return its number; meanwhile send ``state()`` if it is asked for."""

    @abstractmethod
    def acting_state(self, version: int) -> ActingState | None:
        """Return the newest state; None if that is ``version``."""

    @abstractmethod
    def submit(self, unroll: Unroll, report: Report) -> None:
        """Send the unroll in the last slot."""

    def beat(self) -> None:
        """Tell that the worker is alive; called several times per step."""
        return


def too_many_failures(max_restarts: int, last: WorkerError) -> UserError:
    """Return the error of a run that has replaced its workers as often as it may."""
    error = UserError(
        f"More than {max_restarts} workers failed (impala.max_restarts), the last one so: {last.name} {last.what}; fix "
        "the cause, or raise impala.max_restarts."
    )
    error.details = last.details
    return error
