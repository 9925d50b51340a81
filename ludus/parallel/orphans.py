"""Processes that environments start, and their end: none outlives the run. Needs Linux; elsewhere it does nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

GRACE = 1.0  # seconds from SIGTERM to SIGKILL
MARK = "LUDUS_WORKER"  # in the environment variables of what a worker starts: the worker's process
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from ludus.parallel.child import main; main()"
OWN: set[int] = set()  # processes that Ludus itself started here


class Stat(NamedTuple):
    """What the kernel says of a process."""

    parent: int
    session: int
    start: int  # when it was started: with its number, this names it for good


def stats() -> dict[int, Stat]:
    """Every process that is running, zombies left out."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found[int(entry.name)] = Stat(int(fields[1]), int(fields[3]), int(fields[19]))
    return found


def below(pids: Iterable[int], known: dict[int, Stat]) -> list[int]:
    """Processes and all that descend from them."""
    found: list[int] = []
    level = list(pids)
    while level:
        found += level
        level = [pid for pid, stat in known.items() if stat.parent in level]
    return found


def marked(pid: int) -> int:
    """The worker that a process comes from, by the variable that it inherited; 0 where there is none."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(f"{MARK}=".encode()):
                return int(line.partition(b"=")[2])
    return 0


def end_orphans(living: Iterable[int]) -> None:
    """End all processes below this one but some and what comes from these; this one adopts orphans (a subreaper)."""
    spared, own = set(living), os.getpid()
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 10 * GRACE)):
        sent, until = set[int](), time.monotonic() + seconds
        while True:
            reap(spared)
            known = stats()
            children = [pid for pid, stat in known.items() if stat.parent == own and pid not in spared]
            left = [pid for pid in children if known[pid].session not in spared and marked(pid) not in spared]
            if not left:
                return
            if time.monotonic() > until:
                break
            for pid in set(left) - sent:
                send(pid, number)
                sent.add(pid)
            time.sleep(0.01)


def reap(spared: Iterable[int]) -> None:
    """Collect orphans that have ended; the exit codes of ``spared`` are for others to read."""
    for name in _children_file().split():
        if int(name) not in spared:
            with suppress(ChildProcessError):
                os.waitpid(int(name), os.WNOHANG)


def send(pid: int, number: int) -> None:
    """Send a signal, if there still is a process to take it."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class StartedProcesses:
    """Notes which processes this thread starts within ``with`` blocks, and ends those that are left.

    Processes of other threads, those from outside the blocks, and those of Ludus and of multiprocessing's own helpers
    are left alone. (The kernel hands the children of a thread that ends to another thread, so those of a thread that
    ended within a block count as this one's.)
    """

    def __init__(self) -> None:
        self._before = b""
        self._found: dict[int, int] = {}  # process → when it was started
        self._fd: int | None = None  # lists the children of this thread; -1 where that is not to be had

    def __enter__(self) -> None:
        if self._fd is None:
            try:
                self._fd = os.open("/proc/thread-self/children", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # not Linux, or a kernel that does not say
                self._fd = -1
        self._before = self._children()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = self._children()
        if now != self._before:
            known = stats()
            new = {int(pid) for pid in now.split()} - {int(pid) for pid in self._before.split()}
            self._found |= {pid: known[pid].start for pid in new & known.keys()}

    def end(self) -> None:
        """End what is left of them and what they started: SIGTERM, a second later SIGKILL. May be called twice."""
        fd, self._fd = self._fd, -1
        found, self._found = self._found, {}
        if fd is not None and fd >= 0:
            os.close(fd)
        if not found:
            return
        known, kept = stats(), OWN | _helpers()
        targets = {
            pid: start
            for pid, start in found.items()
            if pid in known and known[pid].start == start and known[pid].parent == os.getpid() and pid not in kept
        }
        for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 10 * GRACE)):
            sent, until = set[int](), time.monotonic() + seconds
            while left := [pid for pid, start in targets.items() if pid in known and known[pid].start == start]:
                targets |= {pid: known[pid].start for pid in below(left, known)}
                for pid in set(left) - sent:
                    send(pid, number)
                    sent.add(pid)
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
                known = stats()
        for pid in targets:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _children(self) -> bytes:
        return os.pread(self._fd, 1 << 16, 0) if self._fd is not None and self._fd >= 0 else b""


def _children_file() -> bytes:
    with suppress(OSError):
        return Path("/proc/thread-self/children").read_bytes()
    return b""


def _helpers() -> set[int]:
    """Helper processes of multiprocessing, which live as long as this process does."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return {pid for pid in (getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)) if pid}
