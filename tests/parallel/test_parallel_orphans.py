"""Processes that environments start are ended, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ludus.parallel.orphans import StartedProcesses, running_processes, with_descendants
from ludus.parallel.process import Launcher

HERE = Path(__file__).parent
SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]
DEAF = [sys.executable, "-c", "import signal, time; signal.signal(15, 1); print(flush=True); time.sleep(1000)"]


def running(pid: int) -> bool:
    return pid in running_processes()


def wait_until_gone(pids: list[int]) -> None:
    while any(map(running, pids)):  # pytest-timeout ends a test that waits in vain
        time.sleep(0.01)


@pytest.fixture
def other():
    """A process that was there before."""
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def test_started_processes_and_descendants_are_ended(other, tmp_path):
    note = tmp_path / "grandchild"
    parent = f"import subprocess, time; p = subprocess.Popen({SLEEP!r}); open({str(note)!r}, 'w').write(str(p.pid)); "
    started = StartedProcesses()
    with started:
        child = subprocess.Popen([sys.executable, "-c", parent + "time.sleep(1000)"])
        deaf = subprocess.Popen(DEAF, stdout=subprocess.PIPE)
        deaf.stdout.readline()
    with subprocess.Popen(SLEEP) as outside:
        while not note.exists() or not note.read_text():
            time.sleep(0.01)
        grandchild = int(note.read_text())
        assert grandchild in with_descendants([child.pid], running_processes())
        started.end()
        assert not any(map(running, (child.pid, deaf.pid, grandchild)))
        assert running(other.pid)
        assert running(outside.pid)
        started.end()
        outside.kill()
    deaf.stdout.close()
    assert child.wait() is not None  # its exit code can still be read


def test_processes_of_other_threads_and_of_ludus_are_left_alone(other):
    started, found, done = StartedProcesses(), [], threading.Event()
    with started:
        thread = threading.Thread(target=lambda: (found.append(subprocess.Popen(SLEEP)), done.wait()))
        thread.start()
        while not found:
            time.sleep(0.01)
        launcher = Launcher("forkserver")
        launcher._ensure_server()
    started.end()
    assert running(found[0].pid)
    assert running(launcher._server.pid)
    launcher.close()
    found[0].kill()
    found[0].wait()
    done.set()
    thread.join()


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
@pytest.mark.parametrize("how", ["ends", "killed", "hangs"])
def test_orphans_of_a_worker_are_ended(start, how):
    """In its session, in a new session and as a daemon; orphans of other workers are left alone."""
    launcher = Launcher(start)
    workers = []
    for name in ("first", "second"):
        read, write = os.pipe()
        stop = os.pipe()
        process = launcher.start("parallel_jobs:litter", {}, {"out": write, "go": stop[0]}, name)
        pids = [int(pid) for pid in os.read(read, 1000).split()]
        assert len(pids) == 3
        assert all(map(running, pids))
        workers.append((process, pids, stop))
        os.close(read)
        os.close(write)
    (first, left, stop), (_, kept, other) = workers
    if how == "killed":
        os.kill(first.pid, signal.SIGKILL)
    elif how == "hangs":
        first.abort()
    else:
        os.write(stop[1], b"x")
    assert first.wait(60)
    wait_until_gone(left)
    assert all(map(running, kept))
    launcher.close()
    wait_until_gone(kept)
    for fd in (*stop, *other):
        os.close(fd)


PARENT = """
import os, sys, time
sys.path.insert(0, {here!r})
from ludus.parallel.process import Launcher
read, write = os.pipe()
launcher = Launcher({start!r})
process = launcher.start("parallel_jobs:litter", {{}}, {{"out": write, "go": read}}, "worker")
time.sleep(1000)
"""


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_orphans_are_ended_when_the_parent_is_killed(start, tmp_path):
    note = tmp_path / "pids"
    code = PARENT.format(here=str(HERE), start=start)
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"LITTER": str(note)})
    while not note.exists() or len(note.read_text().split()) < 3:
        time.sleep(0.01)
    tree = [*with_descendants([parent.pid], running_processes())[1:], *map(int, note.read_text().split())]
    parent.kill()
    parent.wait()
    wait_until_gone(tree)
