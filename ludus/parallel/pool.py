"""Pools of processes and of threads that call a function for each of several items.

Processes get import paths, plain values and arrays; nothing is pickled. Threads take any function and any objects.
"""

from __future__ import annotations

import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeVar

from ludus.core import imports
from ludus.core.errors import UserError
from ludus.parallel.message import read_message, write_message
from ludus.parallel.process import Launcher, Start, end_all
from ludus.parallel.thread import Thread

Function = str | Callable[..., Any]  # package.module:function, or a function at the top level of a module
OnDone = Callable[[int, int], object]  # called with the numbers of finished and of all items
MAX_WAIT = 1.0  # seconds of one wait, after which deadlines are read again
R = TypeVar("R")


class ProcessPool:
    """Calls functions in child processes, which end with this one.

    With ``context``, each worker first calls it with its number (0, 1, …) and passes the result, such as a loaded
    model, as the first argument to all functions. Workers are started by the first ``map``, after the server that forks
    them has imported ``preload``. Close the pool, or use it in a ``with`` block.
    """

    def __init__(
        self, workers: int, context: Function | None = None, preload: Sequence[str] = (), start: Start = "forkserver"
    ) -> None:
        _check_workers(workers)
        self._context = "" if context is None else _import_path(context)
        self._launcher = Launcher(start, preload)
        self._workers: list[_Worker | None] = [None] * workers

    def map(
        self, function: Function, items: Iterable[Any], timeout: float = math.inf, on_done: OnDone | None = None
    ) -> list[Any]:
        """Call ``function(item)`` for each item in the next free worker; return the results in the order of the items.

        Items and results consist of dicts with text as keys, lists, numbers, text, None and numpy arrays; tuples become
        lists. If a call raises, its process dies, or it takes more than ``timeout`` seconds (including the start of
        the worker), a WorkerError with the remote traceback and stderr is raised; a UserError is raised as such. Calls
        that run at that moment are ended, and the next ``map`` replaces their workers.
        """
        path, given = _import_path(function), list(items)
        results: list[Any] = [None] * len(given)
        todo = iter(enumerate(given))
        finished = 0
        try:
            for number, (index, item) in zip(range(len(self._workers)), todo, strict=False):
                self._send(number, path, index, item, timeout)
            while finished < len(given):
                for worker in self._wait(path, timeout):
                    results[worker.item] = worker.receive()
                    finished += 1
                    if on_done is not None:
                        on_done(finished, len(given))
                    for index, item in islice(todo, 1):
                        self._send(worker.number, path, index, item, timeout)
        except BaseException:
            self._end(worker for worker in self._workers if worker is not None and worker.busy)
            raise
        return results

    def close(self) -> None:
        """End the workers; may be called twice."""
        self._end(worker for worker in self._workers if worker is not None)
        self._launcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, number: int, path: str, index: int, item: Any, timeout: float) -> None:
        worker = self._workers[number]
        if worker is not None and worker.process.wait(0):  # it was killed between two calls
            self._end([worker])
            worker = None
        if worker is None:
            worker = self._workers[number] = _Worker(self._launcher, number, self._context)
        worker.send(path, index, item, timeout)

    def _wait(self, path: str, timeout: float) -> list[_Worker]:
        """Wait for results and return the workers that have one; raise if a worker ended or is late."""
        busy = [worker for worker in self._workers if worker is not None and worker.busy]
        poll = select.poll()
        for worker in busy:
            poll.register(worker.done, select.POLLIN)
            poll.register(worker.process, select.POLLIN)
        left = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        found = {fd for fd, _ in poll.poll(math.ceil(min(left, MAX_WAIT) * 1000))}
        if ready := [worker for worker in busy if worker.done in found]:  # first: it may have ended after its result
            return ready
        now = time.monotonic()
        for worker in busy:
            if worker.process.fileno() in found or worker.deadline <= now:
                raise self._failure(worker, path, timeout)
        return []

    def _failure(self, worker: _Worker, path: str, timeout: float) -> Exception:
        hung = not worker.process.wait(0)
        if hung:
            worker.process.abort()  # prints its Python stack
        error = worker.process.failure(timeout if hung else 0.0)
        error.name = f"{path}, called for item {worker.item} in {error.name},"
        if not error.user:
            return error
        mistake = UserError(error.user)
        mistake.details = error.user_stack
        return mistake

    def _end(self, workers: Iterable[_Worker]) -> None:
        ended = list(workers)
        end_all([worker.process for worker in ended])
        for worker in ended:
            self._workers[worker.number] = None
            worker.close_files()


class _Worker:
    """A child process of a pool: requests and replies are in two memory files, and two eventfds announce them."""

    def __init__(self, launcher: Launcher, number: int, context: str) -> None:
        self.number, self.item, self.busy, self.deadline = number, -1, False, math.inf
        self.done, self._go = os.eventfd(0, os.EFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC)
        self._request, self._reply = (os.memfd_create(f"ludus-{x}", os.MFD_CLOEXEC) for x in ("request", "reply"))
        fds = {"go": self._go, "done": self.done, "request": self._request, "reply": self._reply}
        settings = {"worker": number, "context": context}
        try:
            self.process = launcher.start("ludus.parallel.pool_worker:serve", settings, fds, f"worker {number}")
        except BaseException:
            self.close_files()
            raise

    def send(self, path: str, index: int, item: Any, timeout: float) -> None:
        """Start a call."""
        write_message(self._request, {"function": path, "item": item})
        self.item, self.busy, self.deadline = index, True, time.monotonic() + timeout
        os.eventfd_write(self._go, 1)

    def receive(self) -> Any:
        """Return the result of the call that ended."""
        os.eventfd_read(self.done)
        self.busy = False
        self.process.truncate_stderr()
        return read_message(self._reply)

    def close_files(self) -> None:
        """Close requests and replies."""
        for fd in (self.done, self._go, self._request, self._reply):
            os.close(fd)


class ThreadPool:
    """Calls functions in threads of this process; they may be local functions, and items and results any objects.

    With ``context``, each thread first calls it with its number (0, 1, …) and passes the result as the first argument
    to the function.
    """

    def __init__(self, workers: int, context: Callable[[int], Any] | None = None) -> None:
        _check_workers(workers)
        self._workers, self._context = workers, context

    def map(
        self,
        function: Callable[..., R],
        items: Iterable[Any],
        timeout: float = math.inf,
        on_done: OnDone | None = None,
    ) -> list[R]:
        """Call ``function(item)`` for each item in the next free thread; return the results in the order of the items.

        The first exception is raised here, and a TimeoutError if a call takes more than ``timeout`` seconds. Then no
        further calls begin, but those that have begun go on, since threads cannot be ended.
        """
        given = list(items)
        results: dict[int, R] = {}
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(given)):
            todo.put(index)
        deadlines = [math.inf] * min(self._workers, len(given))
        events: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # None: a result; a number: that thread ended
        stopped = threading.Event()

        def work(number: int) -> None:
            try:
                first = [] if self._context is None else [self._context(number)]
                while not stopped.is_set() and (index := _take(todo)) is not None:
                    deadlines[number] = time.monotonic() + timeout
                    results[index] = function(*first, given[index])
                    deadlines[number] = math.inf
                    events.put(None)
            finally:
                events.put(number)

        threads = [Thread(work, number, name=f"pool thread {number}") for number in range(len(deadlines))]
        for thread in threads:
            thread.start()
        finished = 0
        try:
            while finished < len(given):
                ended = _next_event(events, deadlines, timeout)
                if ended is not None:
                    threads[ended].join()  # raises its exception
                    continue
                finished += 1
                if on_done is not None:
                    on_done(finished, len(given))
        finally:
            stopped.set()
        return [results[index] for index in range(len(given))]


def _take(todo: queue.SimpleQueue[int]) -> int | None:
    try:
        return todo.get_nowait()
    except queue.Empty:
        return None


def _next_event(events: queue.SimpleQueue[int | None], deadlines: Sequence[float], timeout: float) -> int | None:
    """Wait for the next event; raise if a call has taken too long."""
    while True:
        left = min(deadlines) - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"A call in a thread pool took more than {timeout:g} s.")
        with suppress(queue.Empty):
            return events.get(timeout=min(left, MAX_WAIT))


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise UserError(f"A pool needs at least 1 worker, not {workers}.")


def _import_path(function: Function) -> str:
    """Return the path by which another process imports a function; refuse functions that have none."""
    if isinstance(function, str):
        if ":" not in function:
            raise UserError(f'"{function}" is not the path of a function; give it as package.module:function.')
        return function
    path = imports.import_path(function)
    if not (imports.is_importable_elsewhere(path) and imports.is_importable(path, function)):
        raise UserError(
            f"{path} cannot be imported by another process, because it was defined in a function or at a prompt; "
            "define it at the top level of a module, or use a ThreadPool."
        )
    return path
