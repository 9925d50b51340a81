"""Supervised processes: failures, signals, hangs and cleanup."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ludus.core.errors import UserError
from ludus.parallel import process as process_module
from ludus.parallel.process import GRACE, MAX_STDERR, Launcher, WorkerError, end_all

HERE = Path(__file__).parent
JOBS = "parallel_jobs"
STARTS = ["spawn", "forkserver"]


@pytest.fixture(autouse=True)
def nothing_left():
    """Every test leaves as many file descriptors and children as it found."""
    before = open_fds()
    yield
    assert open_fds() == before
    assert children(os.getpid()) == []


@pytest.fixture(params=STARTS)
def launcher(request):
    launcher = Launcher(request.param)
    yield launcher
    launcher.close()
    launcher.close()


@pytest.fixture
def out():
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def open_fds():
    return sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))


def children(pid):
    """The processes below one, zombies included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found += [int(entry.name), *children(int(entry.name))]
    return found


def hear(fd, seconds=120.0):
    assert select.select([fd], [], [], seconds)[0], "nothing was heard"
    return os.read(fd, 1 << 16)


def gone(pid, seconds=60.0):
    """Wait until a process has ended or is a zombie."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def ended(process):
    assert process.wait(120)
    failure = process.failure()
    process.end()
    return failure


def test_child_gets_settings_fds_and_path(launcher, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"a": [1, 2.5, None], "b": {"c": "ü"}}
    process = launcher.start(f"{JOBS}:tell", settings, {"out": out[1]}, "job")
    seen = json.loads(hear(out[0]))
    assert process.wait(120)
    assert process.code == 0
    assert seen["settings"] == settings
    assert seen["fds"] == ["out"]
    assert seen["cwd"] == str(tmp_path)
    assert not seen["torch"]
    assert seen["sigint"]
    assert len(seen["open"]) <= 7  # three standard ones, life, outcome, out and the listing itself


def test_a_forked_child_is_a_child_of_the_server(out):
    launcher = Launcher("forkserver")
    for _ in range(2):
        process = launcher.start(f"{JOBS}:tell", {}, {"out": out[1]}, "job")
        parent = json.loads(hear(out[0]))["parent"]
        assert parent != os.getpid()
        assert ended(process).code == 0
    launcher.close()
    assert gone(parent)


def test_forked_children_have_different_random_numbers(out):
    launcher = Launcher("forkserver", ["numpy"])
    drawn = set()
    for _ in range(2):
        process = launcher.start(f"{JOBS}:draw", {}, {"out": out[1]}, "job")
        drawn.add(hear(out[0]))
        process.end()
    launcher.close()
    assert len(drawn) == 2


def test_exceptions_have_a_remote_traceback(launcher):
    failure = ended(launcher.start(f"{JOBS}:fail", {}, {}, "worker 3"))
    assert isinstance(failure, WorkerError)
    assert failure.code == 1
    assert 'parallel_jobs.py", line' in failure.traceback
    assert "raise ValueError" in failure.traceback
    assert failure.stderr == "a last word\n"
    said = str(failure)
    assert said.startswith("worker 3 (process ")
    assert "raised ValueError: this is wrong." in said
    assert "a last word" in said
    assert failure.user == ""


def test_user_errors_are_recognized(launcher):
    assert ended(launcher.start(f"{JOBS}:mistake", {}, {}, "job")).user == "Set x to 1."


def test_missing_module(launcher):
    assert "No module named 'nowhere'" in str(ended(launcher.start("nowhere:f", {}, {}, "job")))


@pytest.mark.parametrize(("how", "code"), [("sys", 3), ("os", 4)])
def test_exit_codes(launcher, how, code):
    failure = ended(launcher.start(f"{JOBS}:leave", {"how": how}, {}, "job"))
    assert failure.code == code
    assert ("SystemExit: 3" if how == "sys" else "ended with exit code 4") in str(failure)


def test_crash_reports_signal_and_python_stack(launcher):
    failure = ended(launcher.start(f"{JOBS}:crash", {}, {}, "job"))
    assert failure.signal == "SIGSEGV"
    assert "was killed by SIGSEGV" in str(failure)
    assert "in crash" in failure.stderr


def test_sigkill(launcher, out):
    process = launcher.start(f"{JOBS}:hang", {"how": "asleep"}, {"out": out[1]}, "job")
    hear(out[0])
    assert not process.wait(0)
    os.kill(process.pid, signal.SIGKILL)
    assert ended(process).signal == "SIGKILL"


def test_a_signal_without_a_name(launcher, out):
    process = launcher.start(f"{JOBS}:hang", {"how": "asleep"}, {"out": out[1]}, "job")
    hear(out[0])
    os.kill(process.pid, signal.SIGRTMIN + 1)
    failure = ended(process)
    assert failure.signal == f"signal {signal.SIGRTMIN + 1}"
    assert f"was killed by signal {signal.SIGRTMIN + 1}" in str(failure)


@pytest.mark.parametrize("how", ["asleep", "busy", "c", "deaf"])
def test_hung_processes_are_aborted_with_their_stack(launcher, out, how):
    process = launcher.start(f"{JOBS}:hang", {"how": how}, {"out": out[1]}, "job")
    hear(out[0])
    process.abort()
    failure = process.failure(hung=2.5)
    assert "hung: no answer within 2.5 s" in str(failure)
    assert "in hang" in failure.stderr
    process.end()


def test_a_stopped_process_is_ended(launcher, out):
    process = launcher.start(f"{JOBS}:hang", {"how": "asleep"}, {"out": out[1]}, "job")
    hear(out[0])
    os.kill(process.pid, signal.SIGSTOP)
    process.abort()
    assert process.code == -signal.SIGKILL
    process.end()


def test_endings_escalate(launcher, out):
    """End on a request, on SIGTERM, on SIGKILL."""
    go = os.pipe()
    polite = launcher.start(f"{JOBS}:obedient", {}, {"out": out[1], "go": go[0]}, "polite")
    hear(out[0])
    os.close(go[1])
    end_all([polite], 60)
    asleep = launcher.start(f"{JOBS}:hang", {"how": "asleep"}, {"out": out[1]}, "asleep")
    hear(out[0])
    end_all([asleep], 0.05, grace=60)
    deaf = launcher.start(f"{JOBS}:hang", {"how": "deaf"}, {"out": out[1]}, "deaf")
    hear(out[0])
    deaf.end(grace=0.05)
    assert (polite.code, asleep.code, deaf.code) == (0, -signal.SIGTERM, -signal.SIGKILL)
    os.close(go[0])


def test_long_stderr_is_truncated(launcher, out):
    process = launcher.start(f"{JOBS}:chatter", {}, {"out": out[1]}, "job")
    hear(out[0])
    tail = process.stderr()
    assert len(tail) == 4096
    assert tail.endswith("xthe end")
    process.truncate_stderr()
    assert process.stderr() == ""
    assert MAX_STDERR < 40 * 65536


def test_dead_server_is_replaced(out):
    launcher = Launcher("forkserver")
    first = launcher.start(f"{JOBS}:hang", {"how": "c"}, {"out": out[1]}, "job")
    hear(out[0])
    (server,) = [pid for pid in children(os.getpid()) if pid != first.pid]
    os.kill(server, signal.SIGKILL)
    assert first.wait(60)  # its children go with it
    assert "exit code unknown" in str(first.failure())
    second = launcher.start(f"{JOBS}:tell", {}, {"out": out[1]}, "job")
    assert json.loads(hear(out[0]))["parent"] != server
    assert ended(second).code == 0
    launcher.close()


@pytest.mark.parametrize("kills", [2, 3])
def test_server_killed_during_its_start_is_replaced_twice(out, kills, monkeypatch):
    popen, killed = process_module._popen, []

    def deadly(name, *rest):
        made = popen(name, *rest)
        if name == "the fork server" and len(killed) < kills:
            killed.append(made.pid)
            os.kill(made.pid, signal.SIGKILL)
        return made

    monkeypatch.setattr(process_module, "_popen", deadly)
    launcher = Launcher("forkserver")
    if kills == 3:
        with pytest.raises(WorkerError, match=r"the fork server .* was killed by SIGKILL"):
            launcher.start(f"{JOBS}:tell", {}, {"out": out[1]}, "job")
    else:
        job = launcher.start(f"{JOBS}:tell", {}, {"out": out[1]}, "job")
        assert json.loads(hear(out[0]))["parent"] not in killed
        assert ended(job).code == 0
    assert len(killed) == kills
    launcher.close()


def test_server_import_error():
    launcher = Launcher("forkserver", ["nowhere"])
    with pytest.raises(WorkerError, match=r"(?s)the fork server.*No module named 'nowhere'"):
        launcher.start(f"{JOBS}:fail", {}, {}, "job")
    launcher.close()


PARENT = """
import os, sys, time
sys.path.insert(0, {here!r})
from ludus.parallel.process import Launcher
read, write = os.pipe()
launcher = Launcher({start!r})
for how in ("asleep", "busy", "c", "deaf"):
    process = launcher.start("parallel_jobs:hang", {{"how": how}}, {{"out": write}}, how)
    os.read(read, 4)
    print(process.pid, flush=True)
print("done", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("start", STARTS)
def test_no_child_outlives_a_killed_parent(start):
    command = [sys.executable, "-c", PARENT.format(here=str(HERE), start=start)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = list(iter(parent.stdout.readline, "done\n"))
    below = children(parent.pid)
    os.kill(below[-1], signal.SIGSTOP)  # one that is stopped too
    assert {int(line) for line in lines} <= set(below)
    assert len(below) == 5  # the server and its four
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert [pid for pid in below if not gone(pid)] == []


def test_no_listening_sockets(launcher, out):
    launcher.start(f"{JOBS}:hang", {"how": "asleep"}, {"out": out[1]}, "job")
    hear(out[0])
    inodes = set()
    for pid in [os.getpid(), *children(os.getpid())]:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd) if fd.is_symlink() else ""
            inodes |= {target[8:-1]} if target.startswith("socket:[") else set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split()
        assert inode not in inodes or (not path and not int(flags, 16) & 0x10000)  # no name, and not listening
    for table in ("tcp", "tcp6", "udp", "udp6"):
        path = Path(f"/proc/net/{table}")
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        assert not {line.split()[9] for line in lines} & inodes


SCRIPT = """
import os
from ludus.parallel.process import Launcher

def job(settings, fds):
    os.write(fds["out"], b"found")

{guard}
    read, write = os.pipe()
    launcher = Launcher("{start}")
    process = launcher.start("script:job", {{}}, {{"out": write}}, "job")
    assert process.wait(120)
    failure = process.failure()
    launcher.close()
    print(failure.user or os.read(read, 5).decode())
"""


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"])
def test_script_without_main_guard_raises(tmp_path, guard, start):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=guard, start=start))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if guard == "if True:":
        assert "The module script calls Launcher when it is imported" in done.stdout
        assert '`if __name__ == "__main__":`' in done.stdout
    else:
        assert done.stdout == "found\n"


def test_other_systems_raise(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="need Linux"):
        Launcher()


def test_grace_is_short():
    assert GRACE <= 2
