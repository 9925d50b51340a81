"""Functions that the tests run in child processes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time

from ludus.core.errors import UserError
from ludus.parallel.shared_memory import Block


def tell(settings, fds):
    """Report the state of the child process."""
    seen = {
        "settings": settings,
        "fds": sorted(fds),
        "torch": "torch" in sys.modules,
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "group": os.getpgrp() == os.getpid(),
        "cwd": os.getcwd(),
        "parent": os.getppid(),
        "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    }
    os.write(fds["out"], json.dumps(seen).encode())


def fail(settings, fds):
    print("a last word", file=sys.stderr)
    raise ValueError("this is\nwrong")


def mistake(settings, fds):
    raise UserError("Set x to 1.")


def leave(settings, fds):
    if settings["how"] == "sys":
        sys.exit(3)
    os._exit(4)


def crash(settings, fds):
    ctypes.string_at(0)


def write(settings, fds):
    Block(settings["fields"], fds["block"])["x"][...] += 1


def chatter(settings, fds):
    for _ in range(40):
        sys.stderr.write("x" * 65536)
    sys.stderr.write("the end")
    sys.stderr.flush()
    os.write(fds["out"], b"done")
    time.sleep(60)


def obedient(settings, fds):
    """End on a message from a pipe."""
    os.write(fds["out"], b"here")
    os.read(fds["go"], 1)


def hang(settings, fds):
    """Never end: sleep, loop in Python, block in C with the GIL held, or ignore SIGTERM."""
    if settings["how"] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(fds["out"], b"here")
    if settings["how"] == "c":
        ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the lock
    while settings["how"] == "busy":
        pass
    time.sleep(1000)


def draw(settings, fds):
    import numpy as np

    os.write(fds["out"], json.dumps(np.random.rand()).encode())


def litter(settings, fds):
    """Start a process, one in a new session and an orphaned daemon; then wait for a message to end."""
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    daemon = f"import subprocess; print(subprocess.Popen({sleep!r}, start_new_session=True, stdout=-3).pid)"
    pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
    pids.append(int(subprocess.check_output([sys.executable, "-c", daemon])))
    said = " ".join(map(str, pids))
    if "LITTER" in os.environ:
        with open(os.environ["LITTER"], "w") as file:
            file.write(said)
    os.write(fds["out"], said.encode())
    os.read(fds["go"], 1)
