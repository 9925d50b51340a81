"""Processes that are watched: what ended them is told in full, and none outlives the process that started it.

What crosses is an import path, plain settings and file descriptors; nothing is pickled and no socket is bound.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from ludus.core import imports
from ludus.core.errors import UserError
from ludus.core.text import printable
from ludus.parallel.orphans import BOOT, OWN

Start = Literal["forkserver", "spawn"]
TAIL = 4096  # bytes of a child's stderr that a report shows
KEPT = 1 << 20  # bytes of stderr after which a child that goes on is relieved of what it has written
GRACE = 1.0  # seconds that each step of an ending waits for the next
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerError(Exception):
    """What ended a process: its exception with the remote traceback, the signal or the exit code, and its stderr."""

    def __init__(self, name: str, what: str, code: int | None, told: Mapping[str, Any], stderr: str) -> None:
        self.name, self.what, self.code, self.stderr = name, printable(what), code, printable(stderr)
        self.traceback = printable(told.get("traceback", ""))
        self.user: str = told["said"] if told.get("user") else ""  # the sentence of a UserError raised there
        self.user_stack: str = told.get("details", "")  # and the stack of the user's code that raised it
        super().__init__(name, what)

    @property
    def signal(self) -> str:
        """The name of the signal that ended it, or nothing."""
        return _signal_name(-self.code) if self.code is not None and self.code < 0 else ""

    @property
    def details(self) -> str:
        """The lines that are more than a sentence: the traceback there, and the end of its stderr."""
        traceback = f"\nThere:\n{self.traceback.rstrip()}" if self.traceback else ""
        stderr = f"\nThe last of its stderr:\n{self.stderr.rstrip()}" if self.stderr.strip() else ""
        return traceback + stderr

    def __str__(self) -> str:
        return f"{self.name} {self.what}.{self.details}"


class Process:
    """A running child: something to poll on (``fileno``), to ask for its failure, and to end."""

    def __init__(
        self, name: str, pid: int, pidfd: int, collect: Callable[[float], int | None], kept: dict[str, int]
    ) -> None:
        self.name, self.pid, self.code = name, pid, None if pidfd >= 0 else -1
        self._pidfd, self._collect, self._kept = pidfd, collect, kept  # kept: life, outcome, errors (and status)

    def fileno(self) -> int:
        """A file descriptor that is readable once the process has ended."""
        return self._pidfd

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most so long; return whether it came."""
        if self._pidfd >= 0 and self.code is None and _readable(self._pidfd, seconds):
            self.code = self._collect(GRACE)
            return True
        return self._pidfd < 0 or self.code is not None

    def send(self, number: int) -> None:
        """Send a signal, if there still is a process to take it."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                return

    def end(self, grace: float = GRACE) -> None:
        """End it by SIGTERM, then by SIGKILL, and release all that it holds; may be called twice."""
        end_all([self], grace=grace)

    def abort(self) -> None:
        """End it where it hangs: SIGABRT, on which it writes down the Python lines that it is in, then SIGKILL."""
        for number in (signal.SIGABRT, signal.SIGKILL):
            if not self.wait(0):
                self.send(number)
                self.wait(2 * GRACE if number == signal.SIGABRT else 10 * GRACE)

    def failure(self, hung: float = 0.0) -> WorkerError:
        """What ended it; ``hung``: the seconds after which it was given up."""
        told = self._told()
        if hung:
            what = f"hung: it did not answer in {hung:g} s"
        elif told:
            what = f"raised {told['kind']}: {' '.join(told['said'].split()).rstrip('.')}"
        elif self.code is not None and self.code < 0:
            what = f"was killed by {_signal_name(-self.code)}"
        else:
            what = f"ended with exit code {'unknown' if self.code is None else self.code}"
        return WorkerError(f"{self.name} (process {self.pid})", what, self.code, told, self.stderr())

    def stderr(self) -> str:
        """The last that it wrote there."""
        if "errors" not in self._kept:
            return ""
        size = os.fstat(self._kept["errors"]).st_size
        return os.pread(self._kept["errors"], TAIL, max(0, size - TAIL)).decode(errors="replace")

    def relieve(self) -> None:
        """Drop what it wrote to stderr once that is long: a child may complain at every step for days."""
        if "errors" in self._kept and os.fstat(self._kept["errors"]).st_size > KEPT:
            os.ftruncate(self._kept["errors"], 0)

    def _told(self) -> dict[str, Any]:
        size = os.fstat(self._kept["outcome"]).st_size if "outcome" in self._kept else 0
        try:
            told: dict[str, Any] = json.loads(os.pread(self._kept["outcome"], size, 0)) if size else {}
        except ValueError:  # killed while it wrote
            told = {}
        return told

    def release(self) -> None:
        """Close what it was watched by."""
        kept, self._kept = self._kept, {}
        for fd in (self._pidfd, *kept.values()):
            if fd >= 0:
                os.close(fd)
        self._pidfd = -1


def end_all(processes: Sequence[Process], patience: float = 0.0, grace: float = GRACE) -> None:
    """End processes together, and release all that they hold.

    They have ``patience`` seconds to end of their own accord, ``grace`` more after SIGTERM; then comes SIGKILL.
    """
    for number, seconds in ((None, patience), (signal.SIGTERM, grace), (signal.SIGKILL, 10 * GRACE)):
        left, until = [process for process in processes if not process.wait(0)], time.monotonic() + seconds
        for process in left:
            if number is not None:
                process.send(number)
        for process in left:
            process.wait(max(0.0, until - time.monotonic()))
    for process in processes:
        process.release()


class Launcher:
    """Starts functions of modules, each in a process of its own, and owns these processes.

    ``forkserver``: a small server that has imported ``preload`` forks them, which takes milliseconds. ``spawn``: the
    server starts a new interpreter for each. A function is called as ``function(settings, fds)``; fds by the name that
    ``start`` was given. What a process starts and leaves behind ends with it, and the server sees to that.
    """

    def __init__(self, start: Start = "forkserver", preload: Sequence[str] = (), deadline: float = 60.0) -> None:
        if sys.platform != "linux":
            raise UserError(
                "Environments in processes of their own need Linux; elsewhere set env.backend to simple or vector."
            )
        imports.check_not_importing("Launcher")
        self._method, self._preload, self._deadline = start, list(preload), deadline
        self._processes: list[Process] = []
        self._server: Process | None = None
        self._channel: socket.socket | None = None

    def start(self, target: str, settings: Mapping[str, Any], fds: Mapping[str, int], name: str) -> Process:
        """Call ``target`` (``module:function``) with plain settings in a new process."""
        given = {"life": -1, "outcome": _memory("outcome"), "errors": _memory("errors"), **fds}
        given["life"], life = os.pipe()
        request = _memory("request")
        said = {
            "target": target,
            "settings": dict(settings),
            "names": list(given),
            "path": sys.path,
            "cwd": os.getcwd(),
            "folders": imports.search_folders(),
        }
        os.write(request, json.dumps(said).encode())
        kept = {"life": life, "outcome": given["outcome"], "errors": given["errors"]}
        try:
            process = self._fork(name, [request, *given.values()], kept)
        except BaseException:
            for fd in kept.values():
                os.close(fd)
            raise
        finally:
            os.close(request)
            os.close(given["life"])
        self._processes = [p for p in self._processes if p.fileno() >= 0] + [process]
        return process

    def close(self) -> None:
        """End every process that is left, and the server; may be called twice."""
        processes, self._processes = self._processes, []
        end_all(processes)
        if self._channel is not None:
            self._channel.close()  # the server ends when it sees this
        if self._server is not None:
            self._server.wait(5 * GRACE)  # it ends what others left behind
            self._server.end(grace=5 * GRACE)
        self._channel = self._server = None

    def _fork(self, name: str, numbers: list[int], kept: dict[str, int]) -> Process:
        for tries in (3, 2, 1):  # a server that is killed is replaced, also while it starts
            try:
                self._ensure_server()
            except WorkerError as error:
                if tries > 1 and error.signal:
                    continue
                raise
            assert self._channel is not None
            status, far = os.pipe()
            try:
                socket.send_fds(self._channel, [b"r"], [far, *numbers])
                pid, fds, _, _ = socket.recv_fds(self._channel, 32, 1)
                if fds:
                    kept["status"] = status
                    return Process(name, int(pid), fds[0], partial(_read_code, status), kept)
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                pass
            finally:
                os.close(far)
            os.close(status)
            failure = self._lose_server()
            if tries == 1:
                raise failure
        raise AssertionError

    def _ensure_server(self) -> None:
        """Start the server where there is none, and wait until it has imported what it shall."""
        if self._channel is not None:
            return
        self._channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(self._deadline)
        life, end = os.pipe()
        main = threading.current_thread() is threading.main_thread()
        numbers = [far.fileno(), life]
        spawn = self._method == "spawn"
        said = {
            "do": "serve",
            "fds": numbers,
            "preload": [] if spawn else self._preload,
            "parent": os.getpid() if main else None,  # the kernel means the thread, and other threads come and go
            "spawn": spawn,
        }
        try:
            self._server = _popen("the fork server", said, numbers, {"life": end, "errors": _memory("errors")})
        finally:
            far.close()
            os.close(life)
        try:
            ready = self._channel.recv(16)
        except (TimeoutError, ConnectionResetError):
            ready = b""
        if not ready:
            raise self._lose_server()

    def _lose_server(self) -> WorkerError:
        assert self._server is not None
        assert self._channel is not None
        self._channel.close()
        self._server.wait(GRACE)
        self._server.abort()
        failure = self._server.failure()
        self._server.end()
        self._channel = self._server = None
        return failure


def child_environ() -> dict[str, str]:
    """Return this process's variables, and OMP_NUM_THREADS or one thread for every library that counts its own."""
    return {**dict.fromkeys(THREADS, os.environ.get(THREADS[0], "1")), **os.environ}


def _popen(name: str, said: Mapping[str, Any], numbers: Sequence[int], kept: dict[str, int]) -> Process:
    popen = subprocess.Popen(
        [sys.executable, "-P", "-c", BOOT, json.dumps(said), json.dumps(sys.path)],
        stdin=subprocess.DEVNULL,
        stderr=kept["errors"],
        pass_fds=numbers,
        env=child_environ(),
        process_group=0,  # what a terminal sends to all (Ctrl-C, Ctrl-Z) is for the parent alone
    )
    OWN.add(popen.pid)
    return Process(name, popen.pid, os.pidfd_open(popen.pid), partial(_join, popen), kept)


def _join(popen: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return popen.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _read_code(status: int, seconds: float) -> int | None:
    """The exit code that the server reports, if it lives."""
    said = os.read(status, 16) if _readable(status, seconds) else b""
    return int(said) if said else None


def _readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    until = time.monotonic() + seconds
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _memory(name: str) -> int:
    """A file in memory that everything written to is appended to."""
    fd = os.memfd_create(f"ludus-{name}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd
