"""The interface between a learner and its workers: unrolls one way, what acting depends on the other."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ludus.core.cache import Unroll
from ludus.core.errors import UserError
from ludus.core.step import Episode
from ludus.core.types import State, Tensors
from ludus.parallel.process import WorkerError

START_TIMEOUT = 300.0  # seconds that a worker may take to import torch and to make its environments, at least
POLL = 1.0  # most seconds of one wait


class ActingState(NamedTuple):
    """What workers act with, published by the learner."""

    version: int  # increases with every publication
    progress: float  # share of the run that is done, 0 to 1, for schedules
    tensors: Tensors  # ``Agent.acting_state``, with several roles that of each
    opponents: Tensors | None = None  # self-play: ``Pool.to_workers``; None: as before


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
    """The learner's end of a channel. It also starts the workers, and replaces those that fail.

    A worker fails if it raises or dies, or if one step or reset of its environments takes longer than ``timeout``.
    """

    copies = 0  # how often the tensors of an unroll are copied on the way to this process
    on_warning: Callable[[str], object] = staticmethod(warnings.warn)  # called with messages for the user

    def __init__(self, workers: int, timeout: float, max_restarts: int) -> None:
        self.restarts = 0  # workers replaced so far
        self.incarnations = [0] * workers  # of each worker: how often it was replaced; its seeds depend on that
        self._timeout, self._max_restarts = timeout, max_restarts
        self._interval = min(POLL, timeout / 10)  # seconds of one wait
        self._seen = time.monotonic()  # when hangs were last looked for

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

    def _passed(self) -> float:
        """Return the seconds since the last call; those in which this process was suspended or busy do not count."""
        before, self._seen = self._seen, time.monotonic()
        return min(self._seen - before, POLL)

    def _patience(self, ready: bool) -> float:
        """Return the seconds after which a worker that does not go on counts as hung."""
        return self._timeout if ready else max(START_TIMEOUT, self._timeout)

    @abstractmethod
    def _launch(self, number: int) -> None:
        """Start a worker, in the place of one that failed if there was one."""

    @abstractmethod
    def _wait(self, seconds: float) -> list[tuple[int, WorkerError]]:
        """Wait until something arrives, for at most ``seconds``; return the workers that failed."""

    def _too_many_failures(self, worker: int, error: WorkerError) -> bool:
        """Return whether the failure of a worker is one too many."""
        return self.restarts > self._max_restarts

    def _replace_failed(self, seconds: float) -> None:
        """Wait, and replace the workers that failed."""
        for worker, error in self._wait(seconds):
            self._replace(worker, error)

    def _replace(self, worker: int, error: WorkerError) -> None:
        """Report a worker that failed, and start another one with other seeds in its place."""
        self.restarts += 1
        if self._too_many_failures(worker, error):
            ended = UserError(
                f"More than {self._max_restarts} workers failed (impala.max_restarts), the last one so: {error.name} "
                f"{error.what}; fix the cause, or raise impala.max_restarts."
            )
            ended.details = f"{error.details.lstrip()}\n" if error.details else ""
            raise ended
        self.on_warning(f"{error.name} {error.what}; it is replaced, and its episodes are lost.{error.details}")
        self.incarnations[worker] += 1
        self._launch(worker)


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

    @abstractmethod
    def beat(self) -> None:
        """Tell that the worker goes on; called several times per step."""


def start_error(error: WorkerError, where: str = "") -> UserError:
    """Return the error of a worker that could not be started; ``where`` is put before a sentence for the user."""
    mistake = UserError(f"{where}{error.user}" if error.user else f"{error.name} {error.what} when it was started.")
    mistake.details = error.user_stack or error.details
    return mistake
