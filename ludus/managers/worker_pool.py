"""The worker processes of SubProcEnvManager: orders through shared memory, and waiting for their answers."""

from __future__ import annotations

import os
import platform
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.core.spec import Specs
from ludus.environments.config import EnvConfig
from ludus.environments.rows import WARNING_BITS, StepArrays
from ludus.environments.spaces import Arrays
from ludus.environments.worker import ACTION_PREFIX, CACHE_LINE, MESSAGE, QUIT, READY, STEP, STEP_PREFIX, fields
from ludus.parallel.message import read_message, write_message
from ludus.parallel.process import GRACE, Launcher, Process, WorkerError, end_all
from ludus.parallel.resources import cores
from ludus.parallel.shared_memory import Block

Failed = list[tuple[int, WorkerError]]  # workers that died or hang
NONE: Failed = []
Watch = tuple[memoryview, memoryview, int, Callable[[float], list[tuple[int, int]]]]  # order, answer, fd, poll
START_TIMEOUT = 60.0  # seconds that creating one environment may take, at least
MAX_POLL = 1.0  # seconds of one poll
SUSPENDED = 1.0  # seconds: a poll that returns this long after its timeout means that this process was suspended
SPIN = 100_000  # nanoseconds of busy waiting before sleeping; waking up takes a good part of that
PRELOAD = ("numpy", "gymnasium", "ludus.environments.worker")


@dataclass
class Part:
    """The rows of one worker in one group."""

    number: int
    worker: int
    group: int
    start: int
    count: int

    @property
    def rows(self) -> slice:
        """The rows in the batch."""
        return slice(self.start, self.start + self.count)


def split_rows(groups: Sequence[slice], workers: int) -> list[Part]:
    """Split the rows of each group between its workers; a single worker serves all groups."""
    parts: list[Part] = []
    shares = [workers * i // len(groups) for i in range(len(groups) + 1)]
    for group, rows in enumerate(groups):
        first, last = (0, 1) if workers == 1 else (shares[group], shares[group + 1])
        cuts = [rows.start + (rows.stop - rows.start) * i // (last - first) for i in range(last - first + 1)]
        parts += [
            Part(len(parts) + i, first + i, group, start, stop - start)
            for i, (start, stop) in enumerate(pairwise(cuts))
        ]
    return parts


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    named = [x.strip() for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x.strip()]
    return (named or list(map(str, range(count))))[:count]


class WorkerPool:
    """Worker processes that share one block of memory with the manager.

    To order something of a part, the manager increments the part's order number and wakes the worker by an eventfd;
    when it is done, the worker sets the answer to the same number and wakes the manager.
    """

    def __init__(
        self, config: EnvConfig, name: str, parts: list[Part], batch: int, specs: tuple[Specs, Specs], branch: int
    ) -> None:
        self._launcher = Launcher(config.start, PRELOAD)  # first, since it raises where workers are not supported
        self.parts, self._config, self._name, self._branch = parts, config, name, branch
        self.workers = max(part.worker for part in parts) + 1
        ordered = platform.machine() in ("x86_64", "AMD64")  # processors on which writes become visible in order
        self._spin = SPIN if self.workers < cores() and ordered else 0
        found = visible_gpus()
        # workers get them in turn; with a single GPU there is nothing to assign
        self._gpus = [found[i % len(found)] for i in range(self.workers)] if len(found) > 1 else []
        actions = {key: ((batch, *s.shape), s.dtype) for key, s in specs[1].items()}
        self._fields = fields(StepArrays.fields(specs[0], batch), actions, len(parts), self.workers)
        self._block = Block(self._fields)
        arrays = self._block.arrays
        self.memory = StepArrays.from_arrays(self._block.with_prefix(STEP_PREFIX))
        self.actions: Arrays = self._block.with_prefix(ACTION_PREFIX)
        self._observation = list(self.memory.observation.values())
        self.infos: NDArray[Any]
        self.infos, self.infos_size = arrays["infos"], arrays["infos_size"]
        self._status = arrays["status"]
        self._orders = [memoryview(line) for line in arrays["orders"]]
        self._answers = [memoryview(line) for line in arrays["answers"]]
        self._go = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(self.workers)]
        self._done = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(self.workers)]
        groups = range(max(part.group for part in parts) + 1)
        self._steps = [[(self._orders[p.number], self._go[p.worker]) for p in parts if p.group == g] for g in groups]
        self._messages = [os.memfd_create("ludus-message", os.MFD_CLOEXEC) for _ in parts]
        self._processes: list[Process | None] = [None] * self.workers
        self._failures: dict[int, WorkerError] = {}  # why the last process of a worker ended
        self._watches: list[list[Watch]] = []

    def start(self, workers: Sequence[int]) -> Failed:
        """Start some workers and wait until their environments are created; return those that failed.

        A new worker writes its first observations to memory, so those of the last step are saved and restored.
        """
        saved = [(x, part.rows, x[part.rows].copy()) for part in self._of(workers) for x in self._observation]
        for worker in workers:
            self._status[worker] = 0
            for part in self._of([worker]):
                self._answers[part.number][0] = self._orders[part.number][0]
            with suppress(BlockingIOError):
                os.eventfd_read(self._done[worker])  # left by the previous process
            self._processes[worker] = self._launch(worker)
        self._watches = [self._watch(group) for group in range(len(self._steps))]
        ready = lambda worker: bool(self._status[worker, READY])  # noqa: E731
        failed = self._until(ready, workers, max(START_TIMEOUT, self._config.timeout))
        for x, rows, before in saved:
            x[rows] = before
        return failed

    def step(self, group: int) -> None:
        """Order all parts of a group to step."""
        for order, go in self._steps[group]:
            order[1] = STEP
            order[0] += 1
            os.eventfd_write(go, 1)

    def order(self, number: int, command: int) -> None:
        """Send a command to the worker of a part."""
        order = self._orders[number]
        order[1] = command
        order[0] += 1
        os.eventfd_write(self._go[self.parts[number].worker], 1)

    def send_message(self, part: Part, message: Any) -> None:
        """Send a command with arguments to a part."""
        write_message(self._messages[part.number], message)
        self.order(part.number, MESSAGE)

    def read_answer(self, part: Part) -> Any:
        """Return the answer to the last message."""
        return read_message(self._messages[part.number])

    def is_pending(self, part: Part) -> bool:
        """Whether the last order is not done."""
        return bool(self._answers[part.number][0] != self._orders[part.number][0])

    def mark_pending(self, parts: Sequence[Part]) -> None:
        """Mark parts of a dead worker as pending."""
        for part in parts:
            self._orders[part.number][0] += 1

    def wait(self, group: int, seconds: float) -> Failed:
        """Wait for a step of all parts of a group; return the workers that died or hang.

        If there is a spare core, wait busily at first. Then sleep until the first part is done, and check the next.
        """
        timeout = _poll_seconds(seconds) * 1000
        for order, answer, done, poll in self._watches[group]:
            if self._spin:
                limit = time.perf_counter_ns() + self._spin
                while order[0] != answer[0] and time.perf_counter_ns() < limit:
                    pass
            while order[0] != answer[0]:
                found = poll(timeout)
                if len(found) != 1 or found[0][0] != done:  # a worker died, or the poll timed out
                    return self.wait_all([part for part in self.parts if part.group == group], seconds)
                os.eventfd_read(done)
        return NONE

    def wait_all(self, parts: Sequence[Part], seconds: float) -> Failed:
        """Wait until the orders of the parts are done; return the workers that died or hang.

        A worker hangs if one call of one environment takes longer than ``seconds``.
        """
        awaited = [part for part in parts if self.is_pending(part)]
        workers = list(dict.fromkeys(part.worker for part in awaited))
        done = lambda worker: not any(p.worker == worker and self.is_pending(p) for p in awaited)  # noqa: E731
        return self._until(done, workers, seconds)

    def wait_for_all(self, seconds: float) -> Failed:
        """Wait for all pending orders of running workers."""
        parts = [part for part in self.parts if self.is_running(part) and self.is_pending(part)]
        for part in parts:
            os.eventfd_write(self._go[part.worker], 1)  # an interrupt may have prevented this
        return self.wait_all(parts, seconds)

    def is_running(self, part: Part) -> bool:
        """Whether the part has a process; it has none if it failed and was not replaced."""
        return self._processes[part.worker] is not None

    def last_row(self, worker: int) -> int:
        """Return the row of the environment that a worker called last."""
        return int(self._status[worker, 0])

    @property
    def warning_bits(self) -> int:
        """The bits of ``WARNINGS`` that apply to the environments of all workers."""
        return int(np.bitwise_or.reduce(self._status.reshape(-1, CACHE_LINE)[:, WARNING_BITS]))

    def trim_output(self) -> None:
        """Limit the captured stderr of the workers."""
        for process in self._processes:
            if process is not None:
                process.truncate_stderr()

    def close(self) -> None:
        """Stop the workers and release everything; may be called twice."""
        if not self._go:
            return
        for part in self.parts:
            self.order(part.number, QUIT)
        end_all([process for process in self._processes if process is not None], GRACE)
        self._launcher.close()
        for fd in (*self._go, *self._done, *self._messages):
            os.close(fd)
        self._go = self._done = self._messages = []
        self._orders, self._answers, self._steps, self._watches = [], [], [], []
        self._observation = []
        self.infos = self.infos_size = self._status = np.zeros(0, np.int64)
        self._block.close()

    def _launch(self, worker: int) -> Process:
        parts = self._of([worker])
        common = {"name": self._name, "branch": self._branch}
        settings = {
            "fields": self._fields,
            "config": asdict(self._config),
            "worker": worker,
            "spin": self._spin,
            "gpu": self._gpus[worker] if self._gpus else None,
            "parts": [{"number": p.number, "start": p.start, "count": p.count, **common} for p in parts],
        }
        letters = {f"letter {part.number}": self._messages[part.number] for part in parts}
        fds = {"memory": self._block.fd, "go": self._go[worker], "done": self._done[worker], **letters}
        try:
            return self._launcher.start("ludus.environments.worker:run_worker", settings, fds, f"worker {worker}")
        except WorkerError as error:
            raise UserError(f"The environment workers cannot be started: {error.name} {error.what}.") from error

    def _until(self, ready: Callable[[int], bool], workers: Sequence[int], seconds: float) -> Failed:
        """Wait until each worker is ready, has died or has reached the deadline; return those that failed.

        The deadline restarts whenever the worker proceeds to its next environment or step. Only the time in which this
        process was running counts, so that suspending the machine or stopping the processes is not taken for a hang.
        """
        alive = {worker: process for worker in workers if (process := self._processes[worker]) is not None}
        failed = [(worker, self._failures[worker]) for worker in workers if worker not in alive]
        poll, missing = select.poll(), set(alive)
        owners = {fd: worker for worker, process in alive.items() for fd in (self._done[worker], process.fileno())}
        for fd in owners:
            poll.register(fd, select.POLLIN)
        progress = {worker: self._status[worker].tobytes() for worker in alive}
        waited = dict.fromkeys(alive, 0.0)
        timeout = _poll_seconds(seconds)
        while missing := {worker for worker in missing if not ready(worker)}:
            began = time.monotonic()
            found = poll.poll(timeout * 1000)
            took = time.monotonic() - began
            for worker in sorted(missing):
                now = self._status[worker].tobytes()
                waited[worker] = waited[worker] + _waited(took, timeout) if now == progress[worker] else 0.0
                progress[worker] = now
                if waited[worker] >= seconds and not ready(worker):
                    for fd in [fd for fd, owner in owners.items() if owner == worker]:
                        poll.unregister(fd)
                        del owners[fd]
                    failed.append((worker, self._lose(worker, seconds)))
                    missing.discard(worker)
            for fd, _ in found:
                worker = owners.get(fd, -1)
                if worker < 0:  # it reached the deadline above
                    continue
                if fd == self._done[worker]:
                    with suppress(BlockingIOError):
                        os.eventfd_read(fd)
                    continue
                poll.unregister(fd)
                if not ready(worker):  # else its death is reported at its next order
                    failed.append((worker, self._lose(worker)))
                    missing.discard(worker)
        return failed

    def _of(self, workers: Sequence[int]) -> list[Part]:
        return [part for part in self.parts if part.worker in workers]

    def _watch(self, group: int) -> list[Watch]:
        """Return what a step of a group polls for each part: its answer, or the death of any of the group's workers."""
        own = [part for part in self.parts if part.group == group]
        alive = [process for part in own if (process := self._processes[part.worker]) is not None]
        watches: list[Watch] = []
        for part in own:
            poll, done = select.poll(), self._done[part.worker]
            for fd in (done, *(process.fileno() for process in alive)):
                poll.register(fd, select.POLLIN)
            watches.append((self._orders[part.number], self._answers[part.number], done, poll.poll))
        return watches

    def _lose(self, worker: int, hung: float = 0.0) -> WorkerError:
        """Release a worker that died, or that hangs since ``hung`` seconds."""
        process = self._processes[worker]
        assert process is not None
        if hung:
            process.abort()
        process.wait(1.0)
        failure = self._failures[worker] = process.failure(hung)
        self._processes[worker] = None
        process.end()
        return failure


def _poll_seconds(seconds: float) -> float:
    """Return the timeout of one poll for a deadline of ``seconds``."""
    return min(MAX_POLL, seconds / 10)


def _waited(took: float, timeout: float) -> float:
    """Return the seconds of a poll that count as waiting; none if this process was suspended."""
    return 0.0 if took > timeout + SUSPENDED else min(took, timeout)
