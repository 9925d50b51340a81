"""Checkpoints under kills at every call, a full disk, readers beside the writer, and a second writer."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from ludus.core.errors import UserError
from ludus.logging.logfile import LogFile
from ludus.logging.metrics import Metrics, read_metrics
from ludus.runs.checkpoint import CheckpointManager, load, load_newest
from ludus.runs.folder import RunDirectory

CALLS = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir", "scandir", "posix_fadvise")


def state_of(step):
    return {"step": step, "w": torch.full((300,), float(step))}


class Killed(BaseException):
    """The process is no more."""


class Killer:
    """Lets the first ``after`` calls of the system through; every later one, of whatever cleans up too, is not made."""

    def __init__(self, monkeypatch, after):
        self.left, self.dead = after, False
        for name in CALLS:
            monkeypatch.setattr(os, name, self.watched(getattr(os, name)))
        write = self.watched(os.write)
        monkeypatch.setattr("ludus.runs.checkpoint.write_all", lambda file, data: self.write(write, file, data))

    def watched(self, function):
        def call(*args, **kwargs):
            self.count()
            return function(*args, **kwargs)

        return call

    def count(self):
        self.left -= 1
        if self.dead or self.left < 0:
            self.dead = True
            raise Killed

    def write(self, write, file, data):
        """Write half, then the rest: a kill between leaves a torn file."""
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            write(file.fileno(), part)


def best_twice(manager):
    manager.save_best(2, state_of(2), 2.0)


def next_step(manager):
    manager.save(2, state_of(2))


def same_step(manager):
    manager.save(1, state_of(2))


def older_step(manager):
    manager.save(0, state_of(2))


def whole(state):
    assert (state["w"] == state["step"]).all()
    return state["step"]


@pytest.mark.parametrize("action", [best_twice, next_step, same_step, older_step])
def test_a_kill_at_every_call_leaves_the_old_or_the_new(ground, monkeypatch, action):
    seen = []
    for after in range(1000):
        run = RunDirectory(ground / str(after))
        run.path.mkdir()
        manager = CheckpointManager(run, keep=1)
        manager.save(1, state_of(1))
        manager.save_best(1, state_of(1), 1.0)
        with monkeypatch.context() as patch:
            killer = Killer(patch, after)
            try:
                action(manager)
            except Killed:
                assert killer.dead
        step = whole(load_newest(run, pytest.fail)[0])
        best = whole(load(run.best)[0])
        seen.append(best if action is best_twice else step)
        assert run.best_checkpoint() == run.best
        CheckpointManager(run, keep=1).save(3, state_of(3))
        manager.save_best(3, state_of(3), 3.0)
        assert whole(load_newest(run, pytest.fail)[0]) == whole(load(run.best)[0]) == 3
        left = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_dir())
        assert left == ["best", "checkpoints", "checkpoints/step_3"]
        if not killer.dead:
            break
        shutil.rmtree(run.path)
    assert len(seen) > 25
    assert set(seen) <= {1, 2}
    assert seen == sorted(seen) or action is older_step
    assert (seen[0], seen[-1]) == (1, 2)


def subprocess_of(code, *arguments, before=()):
    return subprocess.run([*before, sys.executable, "-c", code, *map(str, arguments)], text=True, capture_output=True)


KILLS = """
import os, random, signal, sys, time, torch
from pathlib import Path
from ludus.runs.checkpoint import CheckpointManager, load, load_newest
from ludus.runs.folder import RunDirectory

def write_for_ever(run, step, pipe):
    manager = CheckpointManager(run, keep=2)
    while True:
        step += 1
        state = {"step": step, "w": torch.full((20_000,), float(step))}
        manager.save(step, state)
        manager.save_best(step, state, float(step))
        os.write(pipe, b"%d " % step)

torch.set_num_threads(1)
run, last, rng = RunDirectory(Path(sys.argv[1])), 0, random.Random(1)
for _ in range(12):
    reader, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        write_for_ever(run, last, pipe)
    os.close(pipe)
    said = os.read(reader, 1000)
    time.sleep(rng.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said += os.read(reader, 100_000)
    os.close(reader)
    last = int(said.split()[-1])
    for state, meta in (load_newest(run, sys.exit)[:2], load(run.best)):
        assert last <= meta["step"] <= last + 1, (last, meta)
        assert (state["w"] == meta["step"]).all()
"""


def test_sigkill_in_the_middle_of_saves_loses_at_most_the_one_being_written(tmp_path):
    done = subprocess_of(KILLS, tmp_path)
    assert done.returncode == 0, done.stderr
    manager = CheckpointManager(RunDirectory(tmp_path))
    manager.save(10**6, state_of(1))
    manager.save_best(10**6, state_of(1), 1.0)
    assert [path.name for path in tmp_path.rglob(".*")] == [".saved"]


READERS = """
import os, signal, sys, time, torch
from pathlib import Path
from ludus.runs.checkpoint import CheckpointManager, load, load_newest
from ludus.runs.folder import RunDirectory

def write_for_ever(run):
    manager, step = CheckpointManager(run, keep=2), 0
    while True:
        step += 1
        state = {"step": step, "w": torch.full((20_000,), float(step))}
        manager.save(step, state)
        manager.save(step, state)
        manager.save_best(step, state, float(step))

def read_until(run, end):
    count, newest, best = 0, 0, 0
    while time.monotonic() < end or count < 6 or newest < 6:
        assert run.best_checkpoint() is not None and run.latest_checkpoint() is not None
        for kind, (state, meta) in enumerate((load_newest(run, sys.exit)[:2], load(run.best))):
            assert (state["w"] == meta["step"]).all() and state["step"] == meta["step"]
            assert meta["step"] >= (newest, best)[kind] - kind  # it never goes back
            newest, best = (max(newest, meta["step"]), best) if kind == 0 else (newest, meta["step"])
        assert load(run.best)[1]["step"] >= best
        count += 1
    return count, newest

torch.set_num_threads(1)
run = RunDirectory(Path(sys.argv[1]))
for save in (CheckpointManager(run).save, lambda *a: CheckpointManager(run).save_best(*a, 0.0)):
    save(0, {"step": 0, "w": torch.zeros(20_000)})
end = time.monotonic() + float(sys.argv[2])
writer = os.fork()
if writer == 0:
    write_for_ever(run)
other = os.fork()
try:
    count, newest = read_until(run, end)
except BaseException:
    os.kill(writer, signal.SIGKILL)
    raise
if other == 0:
    os._exit(0)
os.kill(writer, signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
print(count, newest)
"""


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_readers_beside_a_running_training_always_find_a_whole_one(tmp_path, seconds):
    done = subprocess_of(READERS, tmp_path, seconds)
    assert done.returncode == 0, done.stderr
    count, newest = map(int, done.stdout.split())
    assert count > 5
    assert newest > 5


FULL = """
import resource, shutil, signal, sys, torch
from pathlib import Path
from ludus.core.errors import UserError
from ludus.runs.checkpoint import CheckpointManager, load, load_newest
from ludus.settings.config_file import read_config, write_config
from ludus.core.files import write_atomic
from ludus.logging.logfile import LogFile
from ludus.logging.metrics import Metrics, read_metrics
from ludus.runs.folder import RunDirectory

def refused(action, *args):
    for count in range(100_000):
        try:
            action(*args)
        except UserError as error:
            assert all(said in str(error) for said in (*sys.argv[1:], "free some space")), error
            return count
    sys.exit("the disk is never full")

LATER = 1000
run = RunDirectory(Path(sys.argv[1]))
manager, metrics, log = CheckpointManager(run, keep=100), Metrics(run.metrics), LogFile(run.log)
write_config(run.config, {"a": 1}, {})
state = lambda step, size: {"step": step, "w": torch.full((size,), float(step))}
metrics.write(1, {"x": 1.0})
log.note("began")
manager.save(1, state(1, 10_000))
manager.save_best(1, state(1, 10_000), 1.0)
limit = sys.argv[2] == "File too large"
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_001, resource.RLIM_INFINITY))
else:
    steps = iter(range(2, 100))
    assert refused(lambda: manager.save(*(lambda step: (step, state(step, 10_000)))(next(steps)))) > 10
    refused(lambda: write_atomic(run.path / str(next(steps)), bytes(4096)))
for _ in range(3):
    refused(manager.save, LATER, state(LATER, 100_000))
    refused(manager.save_best, LATER, state(LATER, 100_000), 3.0)
refused(metrics.write, 2, {"x": 2.0, "y": 3.0})
refused(log.note, "x" * 999)
refused(lambda: write_config(run.config, {"a": "x" * 10**6}, {}))
assert read_config(run.config) == {"a": 1}
newest, best = load_newest(run, sys.exit), load(run.best)
for step, (loaded, _) in ((newest[1]["step"], newest[:2]), (1, best)):
    assert loaded["step"] == step < LATER and (loaded["w"] == step).all()
assert not list(run.path.rglob(".tmp-*")) and not list(run.path.rglob(".old-*"))
assert run.metrics.read_bytes().endswith(b"}\\n") and run.log.read_bytes().endswith(b"\\n")
assert read_metrics(run.metrics)[0]["step"] == 1
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
else:
    for step in (2, 3, 5):
        shutil.rmtree(run.checkpoints / f"step_{step}")
metrics.write(4, {"x": 4.0})
log.note("again")
manager.save(4, state(4, 10_000))
manager.save_best(4, state(4, 10_000), 4.0)
assert load_newest(run, sys.exit)[1]["step"] == load(run.best)[1]["step"] == read_metrics(run.metrics)[-1]["step"] == 4
"""


def test_a_limit_of_the_file_size_ends_with_a_sentence_and_the_old_ones_intact(tmp_path):
    done = subprocess_of(FULL, tmp_path, "File too large")
    assert done.returncode == 0, done.stderr


def test_a_full_disk_ends_with_a_sentence_and_the_old_ones_intact(tmp_path):
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c"]  # the mount goes with the process
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0"'
    try:
        possible = subprocess.run([*inside, mount, str(tmp_path)], capture_output=True).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("no small disk can be mounted here")
    before = [*inside, f'{mount} && exec "$@"', str(tmp_path)]
    done = subprocess_of(FULL, tmp_path, "No space left on device", before=before)
    assert done.returncode == 0, done.stderr


HOLDS = """
import sys, time
from pathlib import Path
from ludus.runs.folder import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_writer_is_refused_until_the_first_is_gone_however_it_went(tmp_path):
    run = RunDirectory(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "held\n"
            with pytest.raises(UserError, match=f"is being written by process {first.pid}: wait"), run.lock():
                pass
            LogFile(run.log).note("readers and others do not mind")
        finally:
            first.kill()
    with run.lock():
        with pytest.raises(UserError, match=f"process {os.getpid()}"), run.lock():
            pass
        metrics = Metrics(run.metrics)
        metrics.write(1, {})
        assert [line["step"] for line in read_metrics(run.metrics)] == [1]
    with run.lock():
        pass
