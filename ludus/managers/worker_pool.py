"""The workers of a SubProcEnvManager: orders that they get through shared memory, and waits that have three ends."""

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

Failed = list[tuple[int, WorkerError]]  # workers and what became of them
NONE: Failed = []
Watch = tuple[memoryview, memoryview, int, Callable[[float], list[tuple[int, int]]]]  # order, answer, fd, poll
STARTING = 60.0  # seconds that making one environment may take at least
SLICE = 1.0  # seconds of one poll, at most: a hang is counted in these
LATE = 1.0  # seconds: a poll that returns later than that after its timeout shows that this process was frozen
SPIN = 100_000  # nanoseconds to look for an order or an answer before sleeping: to wake up takes a good part of that
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
        """Its rows in the batch."""
        return slice(self.start, self.start + self.count)


def divide(groups: Sequence[slice], workers: int) -> list[Part]:
    """Share the rows of each group between its workers; a single worker serves all groups."""
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


def gpus() -> list[str]:
    """The GPUs that this process may use, by their names for CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    named = [x.strip() for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x.strip()]
    return (named or list(map(str, range(count))))[:count]


class WorkerPool:
    """W processes over one block of shared memory: orders, answers and deaths; of episodes it knows nothing.

    An order to a part is a number that the manager raises and an eventfd that wakes the worker; the worker raises
    the answer to the same number and wakes the manager.
    """

    def __init__(
        self, config: EnvConfig, name: str, parts: list[Part], batch: int, specs: tuple[Specs, Specs], branch: int
    ) -> None:
        self._launcher = Launcher(config.start, PRELOAD)  # first: it refuses where there can be no workers
        self.parts, self._config, self._name, self._branch = parts, config, name, branch
        self.workers = max(part.worker for part in parts) + 1
        ordered = platform.machine() in ("x86_64", "AMD64")  # where one process sees writes in the order of the other
        self._spin = SPIN if self.workers < cores() and ordered else 0
        found = gpus()
        # workers take turns; a single GPU is everybody's
        self._gpus = [found[i % len(found)] for i in range(self.workers)] if len(found) > 1 else []
        actions = {key: ((batch, *s.shape), s.dtype) for key, s in specs[1].items()}
        self._fields = fields(StepArrays.fields(specs[0], batch), actions, len(parts), self.workers)
        self._block = Block(self._fields)
        arrays = self._block.arrays
        self.memory = StepArrays.from_arrays(
            {k.removeprefix(STEP_PREFIX): x for k, x in arrays.items() if k.startswith(STEP_PREFIX)}
        )
        self.actions: Arrays = {
            k.removeprefix(ACTION_PREFIX): x for k, x in arrays.items() if k.startswith(ACTION_PREFIX)
        }
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
        self._letters = [os.memfd_create("ludus-letter", os.MFD_CLOEXEC) for _ in parts]
        self._processes: list[Process | None] = [None] * self.workers
        self._failures: dict[int, WorkerError] = {}  # what became of the last process of a worker
        self._watches: list[list[Watch]] = []

    def start(self, workers: Sequence[int]) -> Failed:
        """Start some workers and wait until they have made their environments; return those that failed.

        The last step stays in memory, though a worker writes there what it first sees.
        """
        shown = [(x, part.rows, x[part.rows].copy()) for part in self._of(workers) for x in self._observation]
        for worker in workers:
            self._status[worker] = 0
            for part in self._of([worker]):
                self._answers[part.number][0] = self._orders[part.number][0]
            with suppress(BlockingIOError):
                os.eventfd_read(self._done[worker])  # what the one before it left
            self._processes[worker] = self._launch(worker)
        self._watches = [self._watch(group) for group in range(len(self._steps))]
        ready = lambda worker: bool(self._status[worker, READY])  # noqa: E731
        failed = self._until(ready, workers, max(STARTING, self._config.timeout))
        for x, rows, before in shown:
            x[rows] = before
        return failed

    def step(self, group: int) -> None:
        """Order all parts of a group to step."""
        for order, go in self._steps[group]:
            order[1] = STEP
            order[0] += 1
            os.eventfd_write(go, 1)

    def order(self, number: int, told: int) -> None:
        """Tell a part's worker what to do."""
        order = self._orders[number]
        order[1] = told
        order[0] += 1
        os.eventfd_write(self._go[self.parts[number].worker], 1)

    def write(self, part: Part, letter: Any) -> None:
        """Order a part to do what a letter says."""
        write_message(self._letters[part.number], letter)
        self.order(part.number, MESSAGE)

    def answer(self, part: Part) -> Any:
        """What the worker wrote back."""
        return read_message(self._letters[part.number])

    def busy(self, part: Part) -> bool:
        """Whether the last order is still being carried out."""
        return bool(self._answers[part.number][0] != self._orders[part.number][0])

    def interrupt(self, parts: Sequence[Part]) -> None:
        """Count parts of a worker that is dead as busy with what they were doing."""
        for part in parts:
            self._orders[part.number][0] += 1

    def wait(self, group: int, seconds: float) -> Failed:
        """Wait for all parts of a group; the way of every step, so it does no more than it must.

        It looks for a moment, where there is a core for that. Then it sleeps until the first part is done, and looks at
        the next: what is done by then wakes nobody.
        """
        patience = _slice(seconds) * 1000
        for order, answer, done, poll in self._watches[group]:
            if self._spin:
                limit = time.perf_counter_ns() + self._spin
                while order[0] != answer[0] and time.perf_counter_ns() < limit:
                    pass
            while order[0] != answer[0]:
                found = poll(patience)
                if len(found) != 1 or found[0][0] != done:  # a death, or nothing for a while
                    return self.wait_all([part for part in self.parts if part.group == group], seconds)
                os.eventfd_read(done)
        return NONE

    def wait_all(self, parts: Sequence[Part], seconds: float) -> Failed:
        """Wait until the parts have done what they were ordered; return the workers that died or hang instead.

        A worker hangs if one call of one environment takes longer than ``seconds``.
        """
        awaited = [part for part in parts if self.busy(part)]
        workers = list(dict.fromkeys(part.worker for part in awaited))
        done = lambda worker: not any(p.worker == worker and self.busy(p) for p in awaited)  # noqa: E731
        return self._until(done, workers, seconds)

    def wait_for_all(self, seconds: float) -> Failed:
        """Wait for every order that is out; workers that are gone have none."""
        parts = [part for part in self.parts if self.mans(part) and self.busy(part)]
        for part in parts:
            os.eventfd_write(self._go[part.worker], 1)  # an interrupt may have come before this was done
        return self.wait_all(parts, seconds)

    def mans(self, part: Part) -> bool:
        """Whether there is a process for a part; there is none where one failed and was not replaced."""
        return self._processes[part.worker] is not None

    def where(self, worker: int) -> int:
        """The row whose environment a worker called last."""
        return int(self._status[worker, 0])

    @property
    def remarks(self) -> int:
        """What the environments of all workers gave cause to warn of, as bits."""
        return int(np.bitwise_or.reduce(self._status.reshape(-1, CACHE_LINE)[:, WARNING_BITS]))

    def relieve(self) -> None:
        """Drop long complaints of the workers."""
        for process in self._processes:
            if process is not None:
                process.truncate_stderr()

    def close(self) -> None:
        """Ask the workers to quit, see to it that they do, and release everything; may be called twice."""
        if not self._go:
            return
        for part in self.parts:
            self.order(part.number, QUIT)
        end_all([process for process in self._processes if process is not None], GRACE)
        self._launcher.close()
        for fd in (*self._go, *self._done, *self._letters):
            os.close(fd)
        self._go = self._done = self._letters = []
        self._orders, self._answers, self._steps, self._watches = [], [], [], []
        self._observation = []
        self.infos = self.infos_size = self._status = np.zeros(0, np.int64)
        self._block.close()

    def _launch(self, worker: int) -> Process:
        parts = self._of([worker])
        place = {"name": self._name, "branch": self._branch}
        settings = {
            "fields": self._fields,
            "config": asdict(self._config),
            "worker": worker,
            "spin": self._spin,
            "gpu": self._gpus[worker] if self._gpus else None,
            "parts": [{"number": p.number, "start": p.start, "count": p.count, **place} for p in parts],
        }
        letters = {f"letter {part.number}": self._letters[part.number] for part in parts}
        fds = {"memory": self._block.fd, "go": self._go[worker], "done": self._done[worker], **letters}
        try:
            return self._launcher.start("ludus.environments.worker:run_worker", settings, fds, f"worker {worker}")
        except WorkerError as error:
            raise UserError(f"The environment workers cannot be started: {error.name} {error.what}.") from error

    def _until(self, ready: Callable[[int], bool], workers: Sequence[int], seconds: float) -> Failed:
        """Wait for each worker's message, its death, or the deadline, whichever comes first; it may be gone already.

        The deadline of a worker begins anew whenever it goes on to its next environment or step. Only time in which
        this process was running counts, so a suspended machine or a stopped process tree is not taken for a hang.
        """
        alive = {worker: process for worker in workers if (process := self._processes[worker]) is not None}
        failed = [(worker, self._failures[worker]) for worker in workers if worker not in alive]
        poll, missing = select.poll(), set(alive)
        owners = {fd: worker for worker, process in alive.items() for fd in (self._done[worker], process.fileno())}
        for fd in owners:
            poll.register(fd, select.POLLIN)
        progress = {worker: self._status[worker].tobytes() for worker in alive}
        waited = dict.fromkeys(alive, 0.0)
        patience = _slice(seconds)
        while missing := {worker for worker in missing if not ready(worker)}:
            began = time.monotonic()
            found = poll.poll(patience * 1000)
            took = time.monotonic() - began
            for worker in sorted(missing):
                now = self._status[worker].tobytes()
                waited[worker] = waited[worker] + _counted(took, patience) if now == progress[worker] else 0.0
                progress[worker] = now
                if waited[worker] >= seconds and not ready(worker):
                    for fd in [fd for fd, owner in owners.items() if owner == worker]:
                        poll.unregister(fd)
                        del owners[fd]
                    failed.append((worker, self._lose(worker, seconds)))
                    missing.discard(worker)
            for fd, _ in found:
                worker = owners.get(fd, -1)
                if worker < 0:  # given up just now
                    continue
                if fd == self._done[worker]:
                    with suppress(BlockingIOError):
                        os.eventfd_read(fd)
                    continue
                poll.unregister(fd)
                if not ready(worker):  # else its death is told when it is needed next
                    failed.append((worker, self._lose(worker)))
                    missing.discard(worker)
        return failed

    def _of(self, workers: Sequence[int]) -> list[Part]:
        return [part for part in self.parts if part.worker in workers]

    def _watch(self, group: int) -> list[Watch]:
        """What a step of a group waits for, part by part: the message, or the death of any of its workers."""
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
        """Release a worker that died, or that hangs."""
        process = self._processes[worker]
        assert process is not None
        if hung:
            process.abort()
        process.wait(1.0)
        failure = self._failures[worker] = process.failure(hung)
        self._processes[worker] = None
        process.end()
        return failure


def _slice(seconds: float) -> float:
    """Seconds of one poll for a deadline of ``seconds``."""
    return min(SLICE, seconds / 10)


def _counted(took: float, asked: float) -> float:
    """Seconds of a poll that count as waiting; none where it took so long that this process must have been frozen."""
    return 0.0 if took > asked + LATE else min(took, asked)
