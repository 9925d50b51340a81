"""Stop a run on SIGINT, SIGTERM or SIGHUP, also while it compiles or an environment hangs."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ludus.containers.local import LocalWorker

T = TypeVar("T")
PATIENCE = 10.0  # seconds that a call of an environment may take after a signal, at least
SLOW = 3  # or this many times its longest call so far
INTERRUPTED = 130  # exit code
NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
# whether this is a process of the command line or of its host in a cluster, which may be ended; set where those start
exits = False


class StopOnSignals:
    """Stops a worker after the current update at the first signal, with everything saved, and at once at the second.

    If an environment in this process does not return, KeyboardInterrupt is raised inside it and ``hung`` is set. If
    Python cannot interrupt the call, ``rescue`` is called from another thread, and the command line exits. A worker
    that does not train in the main thread gets no signals: ``stop_runs`` stops it in the same way.
    """

    def __init__(self, worker: LocalWorker, rescue: Callable[[], object]) -> None:
        self._worker, self._rescue = worker, rescue
        self.hung = False  # whether an environment was interrupted because it did not return
        self._hangs: tuple[int, ...] | None = None  # the call that hangs
        self._over = threading.Event()
        self._caught = threading.Event()  # the exception has left the environment
        self._saving = threading.Lock()
        self._saved = False
        self._watcher: threading.Thread | None = None
        self._thread = 0  # the thread that trains, if it is not the main one

    @contextmanager
    def handle(self) -> Iterator[None]:
        """Handle signals, or calls of ``stop_runs``, within this block."""
        if threading.current_thread() is not threading.main_thread():
            self._thread = threading.get_ident()
        with _registered(self) if self._thread else handle_signals(self._stop):
            try:
                yield
            finally:
                self._over.set()
                if self._watcher is not None:  # it must not outlive the interpreter
                    self._watcher.join(PATIENCE)

    def save(self) -> None:
        """Save once, where an environment hangs."""
        self._caught.set()
        self._worker.in_call = self._worker.in_call or self._worker.current_call() is not None
        with self._saving:
            if not self._saved:
                self._saved = True
                self._rescue()

    def ask(self, number: int) -> None:
        """Do what the signal ``number`` does, for a worker that does not train in the main thread."""
        if self._request(number) is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread), ctypes.py_object(KeyboardInterrupt)
            )

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if (message := self._request(number)) is not None:
            raise KeyboardInterrupt(*message)

    def _request(self, number: int) -> tuple[str, ...] | None:
        """Let the worker stop after this update; return the arguments of a KeyboardInterrupt to stop it at once."""
        worker = self._worker
        if self._hangs is not None and not self._caught.is_set():
            if worker.current_call() != self._hangs:  # it has returned
                self._hangs = None
                return None
            self.hung = worker.in_call = True
            return ("the environment did not return",)
        if worker.stopping.startswith("SIG"):
            worker.in_call = worker.current_call() is not None
            return ()
        worker.stopping = f"{signal.Signals(number).name} was received"
        compiled = ", which is still being compiled" if worker.compiling else ""
        if worker.reporter is not None and worker.reporter.console is not None:
            worker.reporter.console.urgent(f"Stopping after this update{compiled}; once more to stop at once.")
        self._watcher = threading.Thread(target=self._watch, args=(number,), daemon=True)
        self._watcher.start()
        return None

    def _watch(self, number: int) -> None:
        """Interrupt an environment that does not return."""
        while True:
            seen = self._worker.current_call()
            while not self._over.wait(self._patience()):
                now = self._worker.current_call()
                if now is not None and now == seen:
                    break
                seen = now
            else:
                return
            self._hangs = seen
            if self._thread:
                self.ask(number)
            else:
                signal.pthread_kill(threading.main_thread().ident or 0, number)
            if self._caught.wait(PATIENCE):
                break
            if self._hangs is not None:
                self.save()
                break
        with self._saving:  # wait until it is saved
            pass
        if self._over.wait(PATIENCE):
            return
        if exits:
            self._write_stderr(f"The environment cannot be interrupted, so this process ends now.\n{self.hint()}\n")
            self._worker.started.end()
            os._exit(INTERRUPTED)
        self._write_stderr(f"The environment cannot be interrupted; end it with: kill -9 {os.getpid()}\n")

    def _patience(self) -> float:
        return max(PATIENCE, SLOW * self._worker.longest_call())

    def hint(self) -> str:
        """Return how to resume the run."""
        reporter = self._worker.reporter
        return "" if reporter is None else f"Resume:    ludus resume {shlex.quote(str(reporter.run.path))}"

    def _write_stderr(self, text: str) -> None:
        if not self._worker.settings.quiet:
            os.write(2, text.encode())  # unbuffered: another thread may hold the lock of sys.stderr


_stoppable: list[StopOnSignals] = []  # runs in other threads than the main one


@contextmanager
def _registered(stop: StopOnSignals) -> Iterator[None]:
    _stoppable.append(stop)
    try:
        yield
    finally:
        _stoppable.remove(stop)


def stop_runs(number: int) -> bool:
    """Stop the runs in other threads than the main one as the signal ``number`` would; False if there is none."""
    for stop in list(_stoppable):
        stop.ask(number)
    return bool(_stoppable)


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call ``handler`` for signals that stop a run, within this block; does nothing in other threads than the main."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    handled = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def without_signals(function: Callable[[], T]) -> T:
    """Call ``function`` in a thread with signals blocked, so that the processes it starts ignore Ctrl-C.

    Otherwise a compiler ended by Ctrl-C would look like a loss that cannot be compiled. This thread handles signals
    while it waits.
    """
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in NAMES})
        try:
            result.append(function())
        except BaseException as error:
            errors.append(error)

    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        return function()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if errors:
        raise errors[0]
    return result[0]
