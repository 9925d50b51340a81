"""The child side of ``process.Launcher``: run a function, or serve as a fork server."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from ludus.core import imports
from ludus.core.errors import UserError
from ludus.parallel.orphans import BOOT, WORKER_VARIABLE, end_orphans

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_FDS = 64  # in one request
ORPHANED = 70  # exit code if the parent died before the child was set up to die with it
MAX_TEXT = 200_000  # characters of a traceback that are passed on


def run(numbers: list[int], server: int) -> NoReturn:
    """Run the request in the first file descriptor; the request names the other descriptors.

    ``server`` is the process that forked this one. The new session and the variable mark what this process starts.
    """
    request = json.loads(os.pread(numbers[0], os.fstat(numbers[0]).st_size, 0))
    os.close(numbers[0])
    fds: dict[str, int] = dict(zip(request["names"], numbers[1:], strict=True))
    outcome, code = fds.pop("outcome"), 0
    try:
        _die_with_parent(fds.pop("life"), server)
        _set_up_process(fds.pop("errors"), forked=True)
        os.setsid()
        os.environ[WORKER_VARIABLE] = str(os.getpid())
        sys.path[:] = request["path"]
        os.chdir(request["cwd"])
        imports.set_search_folders(request["folders"])
        imports.resolve(request["target"], {}, "function")(request["settings"], fds)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        os.pwrite(outcome, json.dumps(describe_error(error)).encode(), 0)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 255)  # without exit handlers, which a forked child has from the server


def serve(numbers: list[int], preload: list[str], parent: int | None, spawn: bool) -> NoReturn:
    """Fork a child for each request from the socket, and report its exit code.

    This process is a subreaper: processes that a child leaves behind become its children, and are ended when the child
    or the parent ends.
    """
    channel, life = socket.socket(fileno=numbers[0]), numbers[1]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    _die_with_parent(life, parent, signal.SIGTERM)
    _set_up_process(None, forked=False)
    signal.signal(signal.SIGTERM, _exit)
    for module in preload:
        importlib.import_module(module)
    poll, running = select.poll(), dict[int, tuple[int, int]]()  # pidfd → (pid, pipe for the exit code)
    poll.register(channel, select.POLLIN)
    channel.send(b"ready")
    while True:
        for fd, _ in poll.poll():
            if fd == channel.fileno():
                _fork(channel, life, poll, running, spawn)
            else:
                poll.unregister(fd)
                pid, status = running.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):  # nobody reads it any more
                    os.write(status, str(code).encode())
                os.close(status)
                os.close(fd)
                end_orphans(pid for pid, _ in running.values())


def _exit(*_: Any) -> NoReturn:
    """End all descendants and this process."""
    end_orphans([])
    os._exit(0)


def _fork(channel: socket.socket, life: int, poll: Any, running: dict[int, tuple[int, int]], spawn: bool) -> None:
    _, numbers, _, _ = socket.recv_fds(channel, 1, MAX_FDS)
    if not numbers:  # the parent closed the socket
        _exit()
    status, *numbers = numbers
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        channel.close()
        for fd in (life, status, *running, *(pipe for _, pipe in running.values())):
            os.close(fd)
        if spawn:  # become a new interpreter
            for fd in numbers:
                os.set_inheritable(fd, True)
            request = json.dumps({"do": "run", "fds": numbers, "server": server})
            os.execv(sys.executable, [sys.executable, "-P", "-c", BOOT, request, json.dumps(sys.path)])
        run(numbers, server)
    for fd in numbers:
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    socket.send_fds(channel, [str(pid).encode()], [pidfd])
    poll.register(pidfd, select.POLLIN)
    running[pidfd] = (pid, status)


def _die_with_parent(life: int, parent: int | None, number: int = signal.SIGKILL) -> None:
    """Let the kernel send the signal ``number`` to this process when its parent ends.

    It does so when the parent's end of the pipe ``life`` is closed. A fork of the parent would hold that end open, so
    the death signal of ``parent`` is requested as well.
    """
    if parent is not None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(ORPHANED)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, number)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    ready = select.poll()
    ready.register(life, select.POLLIN)
    if ready.poll(0):  # closed before the signal was requested
        os._exit(ORPHANED)


def _set_up_process(errors: int | None, forked: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if errors is not None:
        os.dup2(errors, 2)
        os.close(errors)
    faulthandler.enable(2)  # a crash or an abort prints the Python stack
    if forked and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all children would draw the same numbers


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return a description of an exception, from which another process makes a ``WorkerError``."""
    return {
        "type": type(error).__name__,
        "message": str(error)[:MAX_TEXT],
        "is_user_error": isinstance(error, UserError),
        "details": str(getattr(error, "details", ""))[-MAX_TEXT:],
        "traceback": "".join(traceback.format_exception(error))[-MAX_TEXT:],
    }


def main() -> NoReturn:
    """Run the request in the command line."""
    request = json.loads(sys.argv[1])
    if request["do"] == "serve":
        serve(request["fds"], request["preload"], request["parent"], request["spawn"])
    run(request["fds"], request["server"])
