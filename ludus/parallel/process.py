"""Supervised child processes: failures come with the remote traceback, and no child outlives its parent.

A child gets an import path, plain settings and file descriptors; nothing is pickled and no socket is bound.
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
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from ludus.core import imports
from ludus.core.errors import UserError
from ludus.core.text import printable
from ludus.parallel.orphans import BOOT, LUDUS_PROCESSES

Start = Literal["forkserver", "spawn"]
TAIL = 4096  # bytes of a child's stderr that an error shows
MAX_STDERR = 1 << 20  # bytes, after which the stderr of a running child is truncated
GRACE = 1.0  # seconds to wait for a process to end before the next signal
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerError(Exception):
    """Why a process ended: its exception with the remote traceback, the signal or exit code, and its stderr."""

    def __init__(self, name: str, what: str, code: int | None, error: Mapping[str, Any], stderr: str) -> None:
        self.name, self.what, self.code, self.stderr = name, printable(what), code, printable(stderr)
        self.traceback = printable(error.get("traceback", ""))
        self.user: str = error["message"] if error.get("is_user_error") else ""  # message of a UserError raised there
        self.user_stack: str = error.get("details", "")  # the traceback of the user's code that raised it
        super().__init__(name, what)

    @property
    def signal(self) -> str:
        """The name of the signal that ended the process, or an empty string."""
        return _signal_name(-self.code) if self.code is not None and self.code < 0 else ""

    @property
    def details(self) -> str:
        """The remote traceback and the end of stderr."""
        traceback = f"\nRemote traceback:\n{self.traceback.rstrip()}" if self.traceback else ""
        stderr = f"\nEnd of its stderr:\n{self.stderr.rstrip()}" if self.stderr.strip() else ""
        return traceback + stderr

    def __str__(self) -> str:
        return f"{self.name} {self.what}.{self.details}"


class Process:
    """A child process, which can be polled (``fileno``)."""

    def __init__(
        self, name: str, pid: int, pidfd: int, read_code: Callable[[float], int | None], fds: dict[str, int]
    ) -> None:
        self.name, self.pid, self.code = name, pid, None if pidfd >= 0 else -1
        self._pidfd, self._read_code, self._fds = pidfd, read_code, fds  # fds: life, outcome, errors, status

    def fileno(self) -> int:
        """Return a file descriptor that is readable once the process has ended."""
        return self._pidfd

    def wait(self, seconds: float) -> bool:
        """Wait until the process ends; return whether it did within ``seconds``."""
        if self._pidfd >= 0 and self.code is None and _readable(self._pidfd, seconds):
            self.code = self._read_code(GRACE)
            return True
        return self._pidfd < 0 or self.code is not None

    def send(self, number: int) -> None:
        """Send a signal if the process still exists."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def end(self, grace: float = GRACE) -> None:
        """End the process by SIGTERM, then SIGKILL, and release its resources; may be called twice."""
        end_all([self], grace=grace)

    def abort(self) -> None:
        """End a hung process by SIGABRT, on which it writes its Python stack to stderr, then SIGKILL."""
        for number in (signal.SIGABRT, signal.SIGKILL):
            if not self.wait(0):
                self.send(number)
                self.wait(2 * GRACE if number == signal.SIGABRT else 10 * GRACE)

    def failure(self, hung: float = 0.0) -> WorkerError:
        """Return why the process ended; ``hung``: the seconds after which it was aborted."""
        size = os.fstat(self._fds["outcome"]).st_size if "outcome" in self._fds else 0
        error: dict[str, Any] = {}
        with suppress(ValueError):  # killed while writing
            error = json.loads(os.pread(self._fds["outcome"], size, 0)) if size else {}
        if hung:
            what = f"hung: no answer within {hung:g} s"
        elif error:
            what = f"raised {error['type']}: {' '.join(error['message'].split()).rstrip('.')}"
        elif self.code is not None and self.code < 0:
            what = f"was killed by {_signal_name(-self.code)}"
        else:
            what = f"ended with exit code {'unknown' if self.code is None else self.code}"
        return WorkerError(f"{self.name} (process {self.pid})", what, self.code, error, self.stderr())

    def stderr(self) -> str:
        """Return the end of what the process wrote to stderr."""
        if "errors" not in self._fds:
            return ""
        size = os.fstat(self._fds["errors"]).st_size
        return os.pread(self._fds["errors"], TAIL, max(0, size - TAIL)).decode(errors="replace")

    def truncate_stderr(self) -> None:
        """Discard stderr once it is long: a child may write warnings at every step for days."""
        if "errors" in self._fds and os.fstat(self._fds["errors"]).st_size > MAX_STDERR:
            os.ftruncate(self._fds["errors"], 0)

    def release(self) -> None:
        """Close the file descriptors."""
        fds, self._fds = self._fds, {}
        for fd in (self._pidfd, *fds.values()):
            if fd >= 0:
                os.close(fd)
        self._pidfd = -1


def end_all(processes: Sequence[Process], patience: float = 0.0, grace: float = GRACE) -> None:
    """End processes and release their resources.

    They have ``patience`` seconds to end by themselves and ``grace`` seconds after SIGTERM; then follows SIGKILL.
    """
    for number, seconds in ((None, patience), (signal.SIGTERM, grace), (signal.SIGKILL, 10 * GRACE)):
        running, until = [process for process in processes if not process.wait(0)], time.monotonic() + seconds
        for process in running:
            if number is not None:
                process.send(number)
        for process in running:
            process.wait(max(0.0, until - time.monotonic()))
    for process in processes:
        process.release()


class Launcher:
    """Starts functions in child processes, and ends these.

    ``forkserver``: a server that has imported ``preload`` forks them, which takes milliseconds. ``spawn``: the server
    starts a new interpreter for each. A function is called as ``function(settings, fds)``. The server also ends
    processes that a child leaves behind.
    """

    def __init__(self, start: Start = "forkserver", preload: Sequence[str] = (), deadline: float = 60.0) -> None:
        if sys.platform != "linux":
            raise UserError(
                "Worker processes need Linux; on other systems set env.backend to simple or vector, and evaluate "
                "without --workers."
            )
        imports.check_not_importing("Launcher")
        self._method, self._preload, self._deadline = start, list(preload), deadline
        self._processes: list[Process] = []
        self._server: Process | None = None
        self._channel: socket.socket | None = None

    def start(self, target: str, settings: Mapping[str, Any], fds: Mapping[str, int], name: str) -> Process:
        """Call ``target`` (``module:function``) in a new process, with plain settings and named file descriptors."""
        given = {"life": -1, "outcome": _memory("outcome"), "errors": _memory("errors"), **fds}
        given["life"], life = os.pipe()
        request_fd = _memory("request")
        request = {
            "target": target,
            "settings": dict(settings),
            "names": list(given),
            "path": sys.path,
            "cwd": os.getcwd(),
            "folders": imports.search_folders(),
        }
        os.write(request_fd, json.dumps(request).encode())
        owned = {"life": life, "outcome": given["outcome"], "errors": given["errors"]}
        try:
            process = self._fork(name, [request_fd, *given.values()], owned)
        except BaseException:
            for fd in owned.values():
                os.close(fd)
            raise
        finally:
            os.close(request_fd)
            os.close(given["life"])
        self._processes = [p for p in self._processes if p.fileno() >= 0] + [process]
        return process

    def close(self) -> None:
        """End all processes and the server; may be called twice."""
        processes, self._processes = self._processes, []
        end_all(processes)
        if self._channel is not None:
            self._channel.close()  # the server ends on this
        if self._server is not None:
            self._server.wait(5 * GRACE)  # it ends orphans first
            self._server.end(grace=5 * GRACE)
        self._channel = self._server = None

    def _fork(self, name: str, numbers: list[int], fds: dict[str, int]) -> Process:
        for attempts_left in (2, 1, 0):  # a server that was killed is replaced, also during its start
            try:
                self._ensure_server()
            except WorkerError as error:
                if attempts_left and error.signal:
                    continue
                raise
            assert self._channel is not None
            status, far = os.pipe()
            try:
                socket.send_fds(self._channel, [b"r"], [far, *numbers])
                pid, pidfds, _, _ = socket.recv_fds(self._channel, 32, 1)
                if pidfds:
                    fds["status"] = status
                    return Process(name, int(pid), pidfds[0], partial(_read_code, status), fds)
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                pass
            finally:
                os.close(far)
            os.close(status)
            failure = self._lose_server()
            if not attempts_left:
                raise failure
        raise AssertionError

    def _ensure_server(self) -> None:
        """Start the server if needed, and wait until it has imported ``preload``."""
        if self._channel is not None:
            return
        self._channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(self._deadline)
        life, end = os.pipe()
        main = threading.current_thread() is threading.main_thread()
        numbers = [far.fileno(), life]
        spawn = self._method == "spawn"
        request = {
            "do": "serve",
            "fds": numbers,
            "preload": [] if spawn else self._preload,
            "parent": os.getpid() if main else None,  # the death signal follows the thread, which may end earlier
            "spawn": spawn,
        }
        try:
            self._server = _popen("the fork server", request, numbers, {"life": end, "errors": _memory("errors")})
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
    """Return the environment variables of children: one thread per library, or OMP_NUM_THREADS if set."""
    return {**dict.fromkeys(THREADS, os.environ.get(THREADS[0], "1")), **os.environ}


def _popen(name: str, request: Mapping[str, Any], numbers: Sequence[int], fds: dict[str, int]) -> Process:
    popen = subprocess.Popen(
        [sys.executable, "-P", "-c", BOOT, json.dumps(request), json.dumps(sys.path)],
        stdin=subprocess.DEVNULL,
        stderr=fds["errors"],
        pass_fds=numbers,
        env=child_environ(),
        process_group=0,  # Ctrl-C and Ctrl-Z in a terminal reach only the parent
    )
    LUDUS_PROCESSES.add(popen.pid)
    return Process(name, popen.pid, os.pidfd_open(popen.pid), partial(_join, popen), fds)


def _join(popen: subprocess.Popen[bytes], seconds: float) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return popen.wait(seconds)
    return None


def _read_code(status: int, seconds: float) -> int | None:
    """Return the exit code that the server reports, if it is running."""
    code = os.read(status, 16) if _readable(status, seconds) else b""
    return int(code) if code else None


def _readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _memory(name: str) -> int:
    """Create an append-only memory file."""
    fd = os.memfd_create(f"ludus-{name}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd
