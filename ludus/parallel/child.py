"""What runs at the other end of ``process.Launcher``: one function of a module, or a server that forks such runs."""

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
from ludus.parallel.orphans import BOOT, MARK, end_orphans

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MOST_FDS = 64  # in one request
ORPHANED = 70  # exit code of a child whose parent died before the child could ask to be killed with it
SAID = 200_000  # characters of a traceback that are passed on


def run(numbers: list[int], server: int) -> NoReturn:
    """Do what the request in the first file descriptor says; the others bear the names that it gives them.

    ``server``: the process that forked this one. What this one starts has a session and a variable that say so.
    """
    request = json.loads(os.pread(numbers[0], os.fstat(numbers[0]).st_size, 0))
    os.close(numbers[0])
    fds: dict[str, int] = dict(zip(request["names"], numbers[1:], strict=True))
    outcome, code = fds.pop("outcome"), 0
    try:
        _guard(fds.pop("life"), server)
        _set_up_process(fds.pop("errors"), forked=True)
        os.setsid()
        os.environ[MARK] = str(os.getpid())
        sys.path[:] = request["path"]
        os.chdir(request["cwd"])
        imports.set_search_folders(request["folders"])
        imports.resolve(request["target"], {}, "function")(request["settings"], fds)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        os.pwrite(outcome, json.dumps(_tell(error)).encode(), 0)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 255)  # no exit handlers: a forked child would run those of the server


def serve(numbers: list[int], preload: list[str], parent: int | None, spawn: bool) -> NoReturn:
    """Start a child for each request that comes over the socket, and say how each one ended.

    Processes that a child started and left behind are adopted by this one and ended: when the child ends, or when the
    parent does, however it ended.
    """
    channel, life = socket.socket(fileno=numbers[0]), numbers[1]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    _guard(life, parent, signal.SIGTERM)
    _set_up_process(None, forked=False)
    signal.signal(signal.SIGTERM, _leave)
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
                with suppress(BrokenPipeError):  # nobody asks any more
                    os.write(status, str(code).encode())
                os.close(status)
                os.close(fd)
                end_orphans(pid for pid, _ in running.values())


def _leave(*_: Any) -> NoReturn:
    """End everything below this process, and this process."""
    end_orphans([])
    os._exit(0)


def _fork(channel: socket.socket, life: int, poll: Any, running: dict[int, tuple[int, int]], spawn: bool) -> None:
    _, numbers, _, _ = socket.recv_fds(channel, 1, MOST_FDS)
    if not numbers:  # the parent has closed its end
        _leave()
    status, *numbers = numbers
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        channel.close()
        for fd in (life, status, *running, *(pipe for _, pipe in running.values())):
            os.close(fd)
        if spawn:
            _exec(numbers, own)
        run(numbers, own)
    for fd in numbers:
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    socket.send_fds(channel, [str(pid).encode()], [pidfd])
    poll.register(pidfd, select.POLLIN)
    running[pidfd] = (pid, status)


def _exec(numbers: list[int], server: int) -> NoReturn:
    """Become a new interpreter that does what the request says."""
    for fd in numbers:
        os.set_inheritable(fd, True)
    said = json.dumps({"do": "run", "fds": numbers, "server": server})
    os.execv(sys.executable, [sys.executable, "-P", "-c", BOOT, said, json.dumps(sys.path)])


def _guard(life: int, parent: int | None, number: int = signal.SIGKILL) -> None:
    """Let the kernel kill this process when its parent is gone, whatever it is doing then.

    The far end of the pipe ``life`` is the parent's alone: when it closes, the kernel sends the signal ``number``.
    A fork of the parent would hold that end too, so the death of ``parent`` itself counts as well.
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
    if ready.poll(0):  # closed before the kernel was asked
        os._exit(ORPHANED)


def _set_up_process(errors: int | None, forked: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if errors is not None:
        os.dup2(errors, 2)
        os.close(errors)
    faulthandler.enable(2)  # a crash or an abort leaves the Python lines that it happened in
    if forked and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all children would draw the server's numbers


def _tell(error: BaseException) -> dict[str, Any]:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return {
        "kind": type(error).__name__,
        "said": str(error)[:SAID],
        "user": "UserError" in kinds,
        "details": str(getattr(error, "details", ""))[-SAID:],
        "traceback": "".join(traceback.format_exception(error))[-SAID:],
    }


def main() -> NoReturn:
    """Read the command line that ``process.Launcher`` wrote."""
    request = json.loads(sys.argv[1])
    if request["do"] == "serve":
        serve(request["fds"], request["preload"], request["parent"], request["spawn"])
    run(request["fds"], request["server"])
