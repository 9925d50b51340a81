"""A channel over shared memory: worker processes on this machine write whole unrolls to slots of the host's memory."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ludus.containers.channel import (
    START_TIMEOUT,
    ActingState,
    Delivery,
    HostChannel,
    Report,
    WorkerChannel,
    start_error,
)
from ludus.core.cache import Unroll
from ludus.core.encoding import from_bytes, to_bytes
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.core.step import Episode
from ludus.core.types import State, Tensors
from ludus.parallel.message import read_message, write_message
from ludus.parallel.process import GRACE, Launcher, Process, WorkerError, end_all
from ludus.parallel.shared_memory import Block

Layout = dict[str, list[Any]]  # of tensors by name: shape, stride and dtype, as plain values
COPIES = 2  # of the acting state: a worker reads one while the host writes the other
PRELOAD = ("torch", "gymnasium", "ludus.containers.impala_worker")
CONTROL = 8  # int64 per cache line
RELEASED, SAVE, OPEN, QUIT = range(4)  # words written by the host: unrolls released, requests to save, flags
SUBMITTED, SAVED, WAITING, READY, BEAT = range(5)  # words written by a worker: unrolls submitted, answers, flags
TIME = 2  # word of a slot after version and number of the unroll: nanoseconds when it was submitted


def layout_of(tensors: Tensors) -> Layout:
    """Return the layout of tensors, which may be on any device."""
    return {
        name: [list(x.shape), list(x.stride()), str(torch.empty(0, dtype=x.dtype).numpy().dtype)]
        for name, x in tensors.items()
    }


def fields_of(layout: Layout, prefix: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the fields of a block that holds tensors of this layout."""
    return {f"{prefix}{name}": ((int(np.prod(shape)),), dtype) for name, (shape, _, dtype) in layout.items()}


def map_tensors(block: Block, layout: Layout, prefix: str) -> Tensors:
    """Return the tensors in a block."""
    return {
        name: torch.as_strided(torch.from_numpy(block[f"{prefix}{name}"]), shape, stride)
        for name, (shape, stride, _) in layout.items()
    }


class PublishedState:
    """The acting state in shared memory: the host writes versions in turn to two copies, and workers read the newest.

    The version of a copy is 0 while it is written. A worker that reads a copy while it changes, because it was
    suspended, sees another version after reading than before, and reads again.
    """

    def __init__(self, layout: Layout, fd: int | None = None) -> None:
        fields: dict[str, tuple[tuple[int, ...], str]] = {
            "latest": ((CONTROL,), "int64"),
            "versions": ((COPIES, CONTROL), "int64"),
            "progress": ((COPIES,), "float64"),
        }
        for i in range(COPIES):
            fields |= fields_of(layout, f"{i}/")
        self.block = Block(fields, fd)
        self._latest, self._versions = self.block["latest"], self.block["versions"]
        self._progress = self.block["progress"]
        self._copies = [map_tensors(self.block, layout, f"{i}/") for i in range(COPIES)]

    @torch.no_grad()
    def write(self, state: ActingState) -> None:
        """Write a version, larger than the last one."""
        copy = state.version % COPIES
        self._versions[copy, 0] = 0
        own = self._copies[copy]
        torch._foreach_copy_([own[name] for name in state.tensors], list(state.tensors.values()))
        self._progress[copy] = state.progress
        self._versions[copy, 0] = state.version
        self._latest[0] = state.version

    def read(self, version: int) -> ActingState | None:
        """Return a copy of the newest version, or None if it is ``version``."""
        while True:
            latest = int(self._latest[0])
            if latest == version:
                return None
            copy = latest % COPIES
            state = ActingState(
                latest, float(self._progress[copy]), {name: x.clone() for name, x in self._copies[copy].items()}
            )
            if self._versions[copy, 0] == latest:
                return state

    def close(self) -> None:
        """Release the memory."""
        self._copies = []
        self._latest = self._versions = self._progress = np.zeros(0)
        self.block.close()


class WorkerMemory:
    """The memory that the host shares with one worker: slots for unrolls, and words of control."""

    def __init__(self, layout: Layout, slots: int, fd: int | None = None) -> None:
        fields: dict[str, tuple[tuple[int, ...], str]] = {
            "host": ((CONTROL,), "int64"),
            "worker": ((CONTROL,), "int64"),
            "slots": ((slots, 3), "int64"),
        }
        for slot in range(slots):
            fields |= fields_of(layout, f"{slot}/")
        self.block = Block(fields, fd)
        self.host, self.worker = self.block["host"].data, self.block["worker"].data  # faster than arrays
        self.slots = self.block["slots"]
        self.unrolls = [map_tensors(self.block, layout, f"{slot}/") for slot in range(slots)]

    def close(self) -> None:
        """Release the memory."""
        self.host = self.worker = np.zeros(CONTROL, np.int64).data
        self.slots, self.unrolls = np.zeros((0, 3), np.int64), []
        self.block.close()


@dataclass
class _Worker:
    """What the host knows of a worker."""

    number: int
    rows: Rows
    memory: WorkerMemory
    go: int  # eventfd that wakes it
    letter: int  # memory file with its state, at the start and when it is saved
    reports: list[int]  # memory files with the report of each slot
    process: Process | None = None
    received: int = 0  # unrolls received
    beat: int = -1  # the last heartbeat that was seen
    silent: float = 0.0  # seconds since then


class SharedHostChannel(HostChannel):
    """Starts worker processes, and exchanges unrolls and acting states with them through shared memory.

    Each worker has a ring of ``slots``, which it writes in order while they are free: ``submitted - released < slots``.
    ``settings`` are those that every worker gets, ``target`` is the function that it runs.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        slots: int,
        unroll: Tensors,
        acting_state: Tensors,
        settings: Mapping[str, Any],
        timeout: float = 60.0,
        max_restarts: int = 10,
        target: str = "ludus.containers.impala_worker:run_worker",
        opponents: Tensors | None = None,
    ) -> None:
        super().__init__(len(rows), timeout, max_restarts)
        self._launcher = Launcher("forkserver", PRELOAD, START_TIMEOUT)  # first: it raises where this is not supported
        self._slots, self._settings, self._target = slots, dict(settings), target
        self._layout, self._state_layout = layout_of(unroll), layout_of(acting_state)
        self._published = PublishedState(self._state_layout)
        self._opponents_layout = layout_of(opponents or {})
        self._opponents = PublishedState(self._opponents_layout)
        self._done = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes the host
        self._open = False  # whether something was published since ``start``
        self._workers = [
            _Worker(
                number,
                part,
                WorkerMemory(self._layout, slots),
                os.eventfd(0, os.EFD_CLOEXEC),
                _memory_file("letter"),
                [_memory_file("report") for _ in range(slots)],
            )
            for number, part in enumerate(rows)
        ]

    def start(self, states: Sequence[State | None]) -> list[str]:
        for worker, state in zip(self._workers, states, strict=True):
            self._launch(worker.number, state)
        while waited := [worker.number for worker in self._workers if not worker.memory.worker[READY]]:
            for number, error in self._wait(self._interval):
                if number in waited:
                    raise start_error(error)
                self._replace(number, error)
        return [_read_state(worker.letter)["restored"] for worker in self._workers]

    def publish(self, state: ActingState) -> None:
        if state.opponents is not None:  # first: workers look for them when they see a new version
            self._opponents.write(state._replace(tensors=state.opponents))
        self._published.write(state)
        if time.monotonic() - self._seen >= self._interval:  # unrolls of other workers may arrive without any wait
            self._replace_failed(0.0)
        if not self._open:
            self._open = True
            for worker in self._workers:
                worker.memory.host[OPEN] = 1
                os.eventfd_write(worker.go, 1)

    def receive(self, worker: int | None = None) -> Delivery:
        while (found := self._oldest(worker)) is None:
            self._replace_failed(self._interval)
        slot = found.received % self._slots
        found.received += 1
        version, number, _ = found.memory.slots[slot].tolist()
        unroll = Unroll(found.memory.unrolls[slot], found.rows, version, number)
        steps, episodes, notes, seconds = read_message(found.reports[slot])
        report = Report(steps, [Episode(*episode) for episode in episodes], notes, seconds)
        return Delivery(found.number, unroll, report)

    def release(self, delivery: Delivery) -> None:
        worker = self._workers[delivery.worker]
        worker.memory.host[RELEASED] += 1
        os.eventfd_write(worker.go, 1)

    def queued(self) -> int:
        return sum([worker.memory.worker[SUBMITTED] - worker.received for worker in self._workers])

    def save(self) -> list[State | None]:
        before = list(self.incarnations)
        for worker in self._workers:
            worker.memory.host[SAVE] += 1
            os.eventfd_write(worker.go, 1)
        while any(worker.memory.host[SAVE] != worker.memory.worker[SAVED] for worker in self._workers):
            self._replace_failed(self._interval)
        return [
            None if self.incarnations[worker.number] != before[worker.number] else _read_state(worker.letter) or None
            for worker in self._workers
        ]

    def close(self) -> None:
        if self._done < 0:
            return
        for worker in self._workers:
            worker.memory.host[QUIT] = 1
            os.eventfd_write(worker.go, 1)
        end_all([worker.process for worker in self._workers if worker.process is not None], GRACE)
        self._launcher.close()
        for worker in self._workers:
            worker.memory.close()
            for fd in (worker.go, worker.letter, *worker.reports):
                os.close(fd)
        os.close(self._done)
        self._published.close()
        self._opponents.close()
        self._workers, self._done = [], -1

    def _oldest(self, number: int | None) -> _Worker | None:
        """Return the worker with the oldest unroll that was not received."""
        workers = self._workers if number is None else [self._workers[number]]
        ready = [worker for worker in workers if worker.memory.worker[SUBMITTED] > worker.received]
        return min(ready, key=lambda worker: worker.memory.slots[worker.received % self._slots, TIME], default=None)

    def _launch(self, number: int, state: State | None = None) -> None:
        """Start a worker; unrolls that a process before it has submitted stay in their slots."""
        worker = self._workers[number]
        memory = worker.memory
        memory.worker[READY] = memory.worker[WAITING] = 0
        memory.worker[SAVED], memory.host[OPEN] = memory.host[SAVE], int(self._open)
        worker.silent, worker.beat = 0.0, -1
        _write_state(worker.letter, state or {})
        settings = self._settings | {
            "worker": worker.number,
            "incarnation": self.incarnations[worker.number],
            "rows": list(worker.rows),
            "slots": self._slots,
            "layout": self._layout,
            "state_layout": self._state_layout,
            "opponents_layout": self._opponents_layout,
        }
        reports = {f"report {slot}": fd for slot, fd in enumerate(worker.reports)}
        shared = {"memory": memory.block.fd, "published": self._published.block.fd, "letter": worker.letter}
        shared["opponents"] = self._opponents.block.fd
        fds = {"go": worker.go, "done": self._done, **shared, **reports}
        try:
            worker.process = self._launcher.start(self._target, settings, fds, f"worker {worker.number}")
        except WorkerError as error:
            raise UserError(f"The workers cannot be started: {error.name} {error.what}.") from error

    def _wait(self, seconds: float) -> list[tuple[int, WorkerError]]:
        poll = select.poll()
        poll.register(self._done, select.POLLIN)
        owners = {worker.process.fileno(): worker for worker in self._workers if worker.process is not None}
        for fd in owners:
            poll.register(fd, select.POLLIN)
        found = poll.poll(seconds * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._done)
        failed = [(owners[fd].number, self._lose(owners[fd])) for fd, _ in found if fd in owners]
        passed = self._passed()
        for worker in self._workers:
            words, orders = worker.memory.worker, worker.memory.host
            full = not orders[OPEN] or words[SUBMITTED] - orders[RELEASED] >= self._slots
            idle = words[READY] and words[WAITING] and full and orders[SAVE] == words[SAVED]
            alive = words[BEAT] != worker.beat or idle
            worker.silent = 0.0 if alive else worker.silent + passed
            worker.beat = words[BEAT]
            limit = self._patience(bool(words[READY]))
            if worker.silent >= limit and worker.process is not None:
                failed.append((worker.number, self._lose(worker, limit)))
        return failed

    def _lose(self, worker: _Worker, hung: float = 0.0) -> WorkerError:
        """Release the process of a worker that died, or that hangs since ``hung`` seconds."""
        process, worker.process = worker.process, None
        assert process is not None
        if hung:
            process.abort()
        process.wait(GRACE)
        failure = process.failure(hung)
        process.end()
        return failure


class SharedWorkerChannel(WorkerChannel):
    """The end of a ``SharedHostChannel`` in a worker process; ``settings`` and ``fds`` are what that passed on."""

    def __init__(self, settings: Mapping[str, Any], fds: Mapping[str, int]) -> None:
        self._slots, self._fds = settings["slots"], fds
        self._memory = WorkerMemory(settings["layout"], self._slots, fds["memory"])
        self._published = PublishedState(settings["state_layout"], fds["published"])
        self._opponents, self._opponents_version = PublishedState(settings["opponents_layout"], fds["opponents"]), 0
        self._host, self._words = self._memory.host, self._memory.worker
        self.memory: Sequence[Tensors | None] = self._memory.unrolls

    def saved_state(self) -> State | None:
        """Return the state to start in; None: new episodes."""
        return _read_state(self._fds["letter"]) or None

    def ready(self, restored: str) -> None:
        """Tell the host that the worker is ready, and how its environments were restored."""
        _write_state(self._fds["letter"], {"restored": restored})
        self._words[READY] = 1
        os.eventfd_write(self._fds["done"], 1)

    def next_slot(self, state: Callable[[], State]) -> int:
        host, words = self._host, self._words
        words[WAITING] = 1
        while True:
            if host[QUIT]:
                raise SystemExit(0)
            if host[SAVE] != words[SAVED]:
                _write_state(self._fds["letter"], state())
                words[SAVED] = host[SAVE]
                os.eventfd_write(self._fds["done"], 1)
            elif host[OPEN] and words[SUBMITTED] - host[RELEASED] < self._slots:
                words[WAITING] = 0
                return int(words[SUBMITTED] % self._slots)
            else:
                os.eventfd_read(self._fds["go"])

    def acting_state(self, version: int) -> ActingState | None:
        state = self._published.read(version)
        opponents = None if state is None else self._opponents.read(self._opponents_version)
        if state is None or opponents is None:
            return state
        self._opponents_version = opponents.version
        return state._replace(opponents=opponents.tensors)

    def submit(self, unroll: Unroll, report: Report) -> None:
        slot = self._words[SUBMITTED] % self._slots
        write_message(self._fds[f"report {slot}"], report)
        self._memory.slots[slot] = unroll.version, unroll.number, time.monotonic_ns()
        self._words[SUBMITTED] += 1
        os.eventfd_write(self._fds["done"], 1)

    def beat(self) -> None:
        self._words[BEAT] += 1


def _write_state(fd: int, state: State) -> None:
    write_message(fd, np.frombuffer(to_bytes(state), np.uint8))


def _read_state(fd: int) -> State:
    return from_bytes(read_message(fd).tobytes())


def _memory_file(name: str) -> int:
    return os.memfd_create(f"ludus-{name}", os.MFD_CLOEXEC)
