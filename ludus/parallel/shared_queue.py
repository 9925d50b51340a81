"""A queue of messages between processes, in shared memory."""

from __future__ import annotations

import fcntl
import math
import os
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

from ludus.core.errors import UserError
from ludus.parallel.message import read_message, write_message
from ludus.parallel.process import Process, WorkerError
from ludus.parallel.shared_memory import Block

MAX_SLOTS = 32  # each takes a file descriptor
WORDS = {"words": ((2,), "int64")}
PUT, TAKEN = range(2)  # words: messages put and taken so far
POLL = 1.0  # most seconds of one wait: a process that was killed may have put a message without announcing it
LOCK_POLL = 1e-4  # seconds between two attempts to get the lock


class SharedQueue:
    """A queue of at most ``slots`` messages, which any number of processes may put and take, in order.

    A message consists of dicts, lists, plain values and arrays; nothing is pickled. Other processes get the file
    descriptors ``fds(name)`` from a ``Launcher`` and call ``SharedQueue.open(name, fds)``. A process that is killed
    leaves the queue as it was before or after its call.
    """

    def __init__(self, slots: int = 8) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise UserError(f"A shared queue has 1 to {MAX_SLOTS} slots, not {slots}.")
        self._words = Block(WORDS)
        self._filled, self._free = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        self._slots = [os.memfd_create("ludus-queue", os.MFD_CLOEXEC) for _ in range(slots)]
        self._thread = threading.Lock()  # the lock of the file does not exclude threads of one process

    @classmethod
    def open(cls, name: str, fds: Mapping[str, int]) -> Self:
        """Open the queue that another process made."""
        queue = cls.__new__(cls)
        queue._words = Block(WORDS, fds[f"{name}/words"])
        queue._filled, queue._free = fds[f"{name}/filled"], fds[f"{name}/free"]
        queue._slots = [fds[key] for i in range(MAX_SLOTS) if (key := f"{name}/{i}") in fds]
        queue._thread = threading.Lock()
        return queue

    def fds(self, name: str) -> dict[str, int]:
        """Return the file descriptors to pass to another process."""
        slots = {f"{name}/{i}": fd for i, fd in enumerate(self._slots)}
        return {f"{name}/words": self._words.fd, f"{name}/filled": self._filled, f"{name}/free": self._free} | slots

    def __len__(self) -> int:
        words = self._words["words"]
        return int(words[PUT] - words[TAKEN])

    def put(self, message: Any, timeout: float = math.inf, watch: Sequence[Process] = ()) -> None:
        """Add a message; wait while the queue is full.

        After ``timeout`` seconds, a TimeoutError is raised. If a process of ``watch`` fails or all have ended, its
        WorkerError is raised, once nothing can be added.
        """
        until = time.monotonic() + timeout
        while True:
            failure = _failure(watch)
            with self._locked(until):
                words = self._words["words"]
                if room := len(self._slots) - len(self):
                    write_message(self._slots[words[PUT] % len(self._slots)], message)
                    words[PUT] += 1
            if room:
                os.eventfd_write(self._filled, 1)
                if room > 1:
                    os.eventfd_write(self._free, 1)  # for the next of those that wait
                return
            self._wait(self._free, until, watch, failure)

    def get(self, timeout: float = math.inf, watch: Sequence[Process] = ()) -> Any:
        """Take the oldest message; wait while there is none, and raise as ``put`` does."""
        until = time.monotonic() + timeout
        while True:
            failure = _failure(watch)  # first: what a process put before it ended is taken
            with self._locked(until):
                words = self._words["words"]
                if waiting := len(self):
                    slot = self._slots[words[TAKEN] % len(self._slots)]
                    message = read_message(slot)
                    words[TAKEN] += 1
                    os.ftruncate(slot, 0)  # frees the memory
            if waiting:
                os.eventfd_write(self._free, 1)
                if waiting > 1:
                    os.eventfd_write(self._filled, 1)
                return message
            self._wait(self._filled, until, watch, failure)

    def close(self) -> None:
        """Release this process's hold of the memory; may be called twice."""
        if not self._slots:
            return
        for fd in (self._filled, self._free, *self._slots):
            os.close(fd)
        self._slots = []
        self._words.close()

    @contextmanager
    def _locked(self, until: float) -> Iterator[None]:
        """Hold the lock of the queue, which the kernel releases if this process dies."""
        with self._thread:
            while True:
                with suppress(BlockingIOError):
                    fcntl.lockf(self._words.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > until:
                    raise TimeoutError("Another process has held the lock of a shared queue for too long.")
                time.sleep(LOCK_POLL)
            try:
                yield
            finally:
                fcntl.lockf(self._words.fd, fcntl.LOCK_UN)

    def _wait(self, event: int, until: float, watch: Sequence[Process], failure: WorkerError | None) -> None:
        if failure is not None:
            raise failure
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"A shared queue stayed {'empty' if event == self._filled else 'full'} for too long.")
        poll = select.poll()
        poll.register(event, select.POLLIN)
        for process in watch:
            if not process.wait(0):
                poll.register(process, select.POLLIN)
        poll.poll(math.ceil(min(left, POLL) * 1000))
        with suppress(BlockingIOError):  # another one that waited took it
            os.eventfd_read(event)


def _failure(processes: Sequence[Process]) -> WorkerError | None:
    """Return the failure of a process, or of the last one if all have ended; None while they run."""
    ended = [process for process in processes if process.wait(0)]
    failed = [process for process in ended if process.code != 0]
    if not failed and len(ended) < max(len(processes), 1):
        return None
    return (failed or ended)[-1].failure()
