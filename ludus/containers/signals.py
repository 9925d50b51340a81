"""Stop a run on Ctrl-C, SIGTERM or a lost terminal, also while it compiles or an environment hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ludus.containers.local import LocalWorker

T = TypeVar("T")
PATIENCE = 5.0  # seconds after a signal that one call of an environment may take, at least
SLOW = 10  # times its mean so far: a step that is always slow is no hang
INTERRUPTED = 130  # exit code
NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
exits = False  # whether this process is the command line's, so that it may be ended; set by ludus.cli.main


class EnvironmentHangs(KeyboardInterrupt):
    """A signal asked to stop, and an environment in this process did not return."""


class StopOnSignals:
    """Lets a worker end at the next update when a signal comes, all saved; a second signal ends it at once.

    Where an environment in this process does not return meanwhile, ``EnvironmentHangs`` is raised inside of it. If it
    is in a call that Python cannot interrupt, ``rescue`` is called from another thread, and the command line exits.
    """

    def __init__(self, worker: LocalWorker, rescue: Callable[[], object]) -> None:
        self._worker, self._rescue = worker, rescue
        self._hangs = False
        self._over = threading.Event()
        self._caught = threading.Event()  # the exception has come out of the environment
        self._saving = threading.Lock()
        self._saved = False

    @contextmanager
    def heed(self) -> Iterator[None]:
        """Heed signals within this block; they can be caught in the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        known = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
        heeded = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
        before = {number: signal.signal(number, self._stop) for number in heeded}
        try:
            yield
        finally:
            self._over.set()
            for number, handler in before.items():
                signal.signal(number, handler)

    def save(self) -> None:
        """Save once what an environment that hangs would lose."""
        self._caught.set()
        with self._saving:
            if not self._saved:
                self._saved = True
                self._rescue()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        worker = self._worker
        if self._hangs and not self._caught.is_set():
            raise EnvironmentHangs
        if worker.stopping.startswith("SIG"):
            raise KeyboardInterrupt
        worker.stopping = f"{signal.Signals(number).name} asked for it"
        compiled = ", which is still being compiled" if worker.compiling else ""
        if worker.reporter is not None and worker.reporter.console is not None:
            worker.reporter.console.urgent(f"Stopping after this update{compiled}; once more to stop at once.")
        threading.Thread(target=self._watch, args=(number,), daemon=True).start()

    def _watch(self, number: int) -> None:
        """Interrupt an environment that does not return."""
        seen = self._worker.busy()
        while not self._over.wait(self._patience()):
            now = self._worker.busy()
            if now is not None and now == seen:
                break
            seen = now
        else:
            return
        self._hangs = True
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        if not self._caught.wait(PATIENCE):
            self.save()
        with self._saving:  # as long as saving takes
            pass
        if self._over.wait(PATIENCE):
            return
        if exits:
            self._say("The environment cannot be interrupted, so this process ends now.\n")
            self._worker.started.end()
            os._exit(INTERRUPTED)
        self._say(f"The environment cannot be interrupted; end it with: kill -9 {os.getpid()}\n")

    def _patience(self) -> float:
        calls = max(1, self._worker.manager.calls)
        return max(PATIENCE, SLOW * self._worker.clock.nanoseconds["environment"] / 1e9 / calls)

    def _say(self, text: str) -> None:
        if not self._worker.settings.quiet:
            os.write(2, text.encode())  # buffered output may be busy right now; this never is


def apart_from_signals(function: Callable[[], T]) -> T:
    """Call ``function`` in a thread, so that what it starts does not get the signals that a terminal sends to all.

    A compiler that Ctrl-C ended could pass for an update that cannot be compiled. This thread waits and heeds signals.
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
