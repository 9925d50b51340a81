"""End processes that environments start and leave behind. Does nothing on other systems than Linux."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

GRACE = 1.0  # seconds from SIGTERM to SIGKILL
WORKER_VARIABLE = "LUDUS_WORKER"  # environment variable that processes inherit from a worker: its process id
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from ludus.parallel.child import main; main()"
LUDUS_PROCESSES: set[int] = set()  # processes that Ludus itself started from this one


class Stat(NamedTuple):
    """A process in /proc."""

    parent: int
    session: int
    start: int  # start time; process ids are reused, the pair is unique


def running_processes() -> dict[int, Stat]:
    """Return every running process, without zombies."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found[int(entry.name)] = Stat(int(fields[1]), int(fields[3]), int(fields[19]))
    return found


def with_descendants(pids: Iterable[int], known: dict[int, Stat]) -> list[int]:
    """Return processes and all their descendants."""
    found: list[int] = []
    level = list(pids)
    while level:
        found += level
        level = [pid for pid, stat in known.items() if stat.parent in level]
    return found


def worker_of(pid: int) -> int:
    """Return the worker that a process descends from, by its environment variable; 0 if none."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(f"{WORKER_VARIABLE}=".encode()):
                return int(line.partition(b"=")[2])
    return 0


def end_orphans(living: Iterable[int]) -> None:
    """End all children of this subreaper except the ``living`` workers and what these started."""
    spared, own = set(living), os.getpid()

    def find() -> list[int]:
        reap(spared)
        known = running_processes()
        children = [pid for pid, stat in known.items() if stat.parent == own and pid not in spared]
        return [pid for pid in children if known[pid].session not in spared and worker_of(pid) not in spared]

    end_all(find)


def end_all(find: Callable[[], list[int]]) -> None:
    """End the processes that ``find`` returns, until it returns none: SIGTERM, after a second SIGKILL."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 10 * GRACE)):
        sent, until = set[int](), time.monotonic() + seconds
        while left := set(find()):
            for pid in left - sent:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            sent |= left
            if time.monotonic() > until:
                break
            time.sleep(0.01)


def reap(spared: Iterable[int]) -> None:
    """Reap zombies, except ``spared``, whose exit codes are read elsewhere."""
    children: list[bytes] = []
    with suppress(OSError):
        children = Path("/proc/thread-self/children").read_bytes().split()
    for name in children:
        if int(name) not in spared:
            with suppress(ChildProcessError):
                os.waitpid(int(name), os.WNOHANG)


class StartedProcesses:
    """Records the processes that this thread starts within ``with`` blocks, and ends them.

    Processes of other threads, of Ludus itself and of multiprocessing's helpers are left alone. (When a thread ends,
    the kernel reassigns its children, so they may be counted as this thread's.)
    """

    def __init__(self) -> None:
        self._before = b""
        self._found: dict[int, int] = {}  # process → start time
        self._fd: int | None = None  # /proc file with the children of this thread; -1 if not available

    def __enter__(self) -> None:
        if self._fd is None:
            self._fd = -1  # not Linux, or a kernel without this file
            with suppress(OSError):
                self._fd = os.open("/proc/thread-self/children", os.O_RDONLY | os.O_CLOEXEC)
        self._before = self._children()

    def __exit__(self, *error: object) -> None:
        now = self._children()
        if now != self._before:
            known = running_processes()
            new = {int(pid) for pid in now.split()} - {int(pid) for pid in self._before.split()}
            self._found |= {pid: known[pid].start for pid in new & known.keys()}

    def end(self) -> None:
        """End the recorded processes and their descendants: SIGTERM, after a second SIGKILL. May be called twice."""
        fd, self._fd = self._fd, -1
        found, self._found = self._found, {}
        if fd is not None and fd >= 0:
            os.close(fd)
        if not found:
            return
        known, spared = running_processes(), LUDUS_PROCESSES | _multiprocessing_helpers()
        targets = {
            pid: start
            for pid, start in found.items()
            if pid in known and known[pid].start == start and known[pid].parent == os.getpid() and pid not in spared
        }

        def find() -> list[int]:
            known = running_processes()
            left = [pid for pid, start in targets.items() if pid in known and known[pid].start == start]
            targets.update({pid: known[pid].start for pid in with_descendants(left, known)})
            return left

        end_all(find)
        for pid in targets:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _children(self) -> bytes:
        return os.pread(self._fd, 1 << 16, 0) if self._fd is not None and self._fd >= 0 else b""


def _multiprocessing_helpers() -> set[int]:
    """Return helper processes of multiprocessing, which live as long as this process."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return {pid for pid in (getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)) if pid}
