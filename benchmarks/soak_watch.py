"""Observe a run from outside: its processes, files, memory and sockets, and leftovers.

Every process below a command carries a mark in its environment, so that none is missed, whoever its parent is by now.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).parents[1]
MARK = "LUDUS_SOAK"
LUDUS = [sys.executable, "-m", "ludus.cli.main"]
NAMED = Path("/dev/shm")  # where named semaphores and shared memory are
FOLDERS = "tmp"  # names there that start so are folders of files
LISTENS = "0A"  # the state of a TCP socket in /proc/net/tcp
Tell = Callable[[float, str], None]  # share that is done, and a few words


class Part(NamedTuple):
    """The result of one part."""

    figures: dict[str, Any]
    broken: list[str]  # violated guarantees


class Sample(NamedTuple):
    """One sample of a run."""

    time: float
    root: int
    fds: int  # of the trainer
    memory: float  # of the trainer, in MB
    processes: int


def mark() -> str:
    """Return a new mark."""
    return uuid.uuid4().hex


def start(words: Sequence[str], marked: str, cwd: Path, errors: IO[Any] | int = subprocess.DEVNULL) -> Any:
    """Start a command of Ludus with the mark in the environment of its processes."""
    environment = os.environ | {MARK: marked, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*LUDUS, *words], cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=errors)


def alive(marked: str) -> list[int]:
    """Return all live processes with the mark."""
    sought, found = f"{MARK}={marked}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if sought in (folder / "environ").read_bytes().split(b"\0") and _state(folder) not in "ZX":
                    found.append(int(folder.name))
    return sorted(found)


def _state(folder: Path) -> str:
    return _stat(folder)[0]


def _stat(folder: Path) -> list[str]:
    return (folder / "stat").read_text().rpartition(")")[2].split()


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if the process is gone."""
    with suppress(OSError):
        return int(_stat(Path(f"/proc/{pid}"))[1])
    return 0


def servers(marked: str, root: int) -> list[int]:
    """Return the fork servers: children of the trainer."""
    return [pid for pid in alive(marked) if parent(pid) == root]


def workers(marked: str, root: int) -> list[int]:
    """Return the environment workers: children of the servers."""
    return [pid for pid in alive(marked) if pid != root and parent(pid) not in (root, 0, 1, os.getpid())]


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes that still exist."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_tree(process: Any, marked: str) -> None:
    """Stop a process tree, so that it starts nothing more, and kill it."""
    send([process.pid], signal.SIGSTOP)
    send(alive(marked), signal.SIGKILL)
    process.wait()


def all_gone(marked: str, seconds: float = 10.0) -> int:
    """Wait until no marked process is left; kill the rest and return their number."""
    until = time.monotonic() + seconds
    while left := alive(marked):
        if time.monotonic() > until:
            send(left, signal.SIGKILL)
            return len(left)
        time.sleep(0.02)
    return 0


def named_memory() -> set[str]:
    """Return named semaphores and shared memory, POSIX and System V."""
    found = {path.name for path in NAMED.iterdir() if not path.name.startswith(FOLDERS)}
    for kind in ("shm", "sem"):
        with suppress(OSError):
            lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
            found |= {f"{kind} {line.split()[1]}" for line in lines}
    return found


def left_behind(before: set[str], seconds: float = 5.0) -> list[str]:
    """Return what remains in addition to ``before``."""
    until = time.monotonic() + seconds
    while (left := named_memory() - before) and time.monotonic() < until:
        time.sleep(0.1)
    return sorted(left)


def open_sockets(pids: Iterable[int]) -> list[str]:
    """Return sockets that are bound to an address or a name; a socketpair has neither."""
    held = {inode for pid in pids for inode in _inodes(pid)}
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for row in _net(kind):
            if row[9] in held:
                found.append(f"{kind} {row[1]} {'listening' if row[3] == LISTENS else 'open'}")
    for row in _net("unix"):
        if row[6] in held and len(row) > 7:
            found.append(f"unix {row[7]}")
    return found


def _net(kind: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    except FileNotFoundError:  # a kernel without it
        return []


def _inodes(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                if link.startswith("socket:["):
                    found.append(link[8:-1])
    return found


class Sampler:
    """Samples a run repeatedly in a thread until it is stopped."""

    def __init__(self, marked: str, every: float = 0.25) -> None:
        self.root = 0  # the trainer; 0: none just now
        self.samples: list[Sample] = []
        self.sockets: set[str] = set()
        self.looks = 0
        self._marked, self._every, self._stop = marked, every, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()

    def growth(self, warm: float = 5.0) -> tuple[float, float]:
        """Return the growth of the trainer's descriptors and memory (MB) since ``warm`` seconds after the start.

        Of samples with the most frequent number of processes, which leaves out starts and evaluations: the second half
        minus the first, by the smallest number of descriptors and the median of memory. Of several trainers, the worst;
        trainers with fewer than 8 such samples are left out.
        """
        worst = (0.0, 0.0)
        for root in {sample.root for sample in self.samples}:
            own = [sample for sample in self.samples if sample.root == root]
            own = [sample for sample in own if sample.time > own[0].time + warm]
            usual = statistics.mode([sample.processes for sample in own] or [0])
            own = [sample for sample in own if sample.processes == usual]
            if len(own) >= 8:
                early, late = own[: len(own) // 2], own[len(own) // 2 :]
                fds = min(s.fds for s in late) - min(s.fds for s in early)
                memory = statistics.median(s.memory for s in late) - statistics.median(s.memory for s in early)
                worst = (max(worst[0], fds), max(worst[1], memory))
        return worst

    def _look(self) -> None:
        while not self._stop.wait(self._every):
            root, pids = self.root, alive(self._marked)
            self.sockets.update(open_sockets(pids))
            self.looks += bool(pids)
            with suppress(OSError):
                if root in pids:
                    fds = len(os.listdir(f"/proc/{root}/fd"))
                    pages = int(Path(f"/proc/{root}/statm").read_text().split()[1])
                    memory = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
                    self.samples.append(Sample(time.monotonic(), root, fds, memory, len(pids)))


def last_step(metrics: Path) -> int:
    """Return the step of the last complete line of metrics."""
    with suppress(OSError, ValueError, IndexError):
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return int(line.partition(b'"step": ')[2].partition(b",")[0])
    return 0
