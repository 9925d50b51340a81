"""Whole runs whose processes are killed: they go on, or are resumed, and leave nothing behind."""

import gc
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults_setup import TINY

import ludus
from benchmarks.soak_kills import Case, fingerprint, finish, suffer
from benchmarks.soak_watch import MARK, alive, left_behind, named_memory, open_sockets
from ludus.core.errors import UserError
from ludus.parallel.orphans import running_processes
from ludus.runs.checkpoint import load_newest
from ludus.runs.folder import RunDirectory

SHORT = """CartPole-v1 --nb-step 2500 --checkpoint-every 1 --log-every 500 --evaluation.every 2000
--evaluation.episodes 2 --agent.normalize-reward --agent.epochs 4 --compile off --threads 1 --quiet"""
SEED, KILLS = 4, 2


def test_a_tree_killed_at_any_moment_and_resumed_ends_as_if_nothing_had_been(ground):
    (ground / "straight").mkdir()
    began = time.monotonic()
    straight = fingerprint(finish("subproc", ground / "straight", SHORT))
    seconds, rng = {"subproc": time.monotonic() - began}, random.Random(SEED)
    cases = [Case(i, "subproc", i % 2 == 0, [rng.uniform(0.4, 1.0)]) for i in range(KILLS)]  # before that it imports
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda case: suffer(case, ground / str(case.number), seconds, SHORT), cases))
    assert [outcome.fingerprint for outcome in outcomes] == [straight] * KILLS, outcomes
    assert [outcome.left for outcome in outcomes] == [0] * KILLS


SETTINGS = TINY | {
    "nb_step": 512,
    "env.num": 4,
    "env.backend": "subproc",
    "env.workers": 2,
    "env.timeout": 3.0,
    "checkpoint_every": 64,
    "agent.minibatches": 2,
    "threads": 1,
}
SIGNS = {
    "raise": "raised UserError: kill_worlds:Mortal: step raised ValueError: the wheel fell off",
    "exit": "ended with exit code 7",
    "kill": "was killed by SIGKILL",
    "hang": "hung: no answer within 3 s",
}
REPORT = (
    r"worker \d \(process \d+\) {sign}[^\n]*; it was at environment (\d), episode seed (\d+), last action (\d)\."
    r"(.*?){how} at seed (\d+), action (\d)"
)


def open_fds():
    found = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {(fd, os.readlink(fd)) for fd in found if os.path.exists(fd)}


@pytest.fixture
def mortal(tmp_path, monkeypatch):
    """``mortal(on_update, **settings)`` trains on Mortal; afterwards nothing is left of it."""
    left = tmp_path / "left"
    left.mkdir()
    monkeypatch.setenv(MARK, tmp_path.name)
    before, memory = open_fds(), named_memory()

    def train(on_update, **settings):
        given = SETTINGS | {"runs": str(tmp_path / "runs"), "env.options": (f"left='{left}'",)} | settings
        return ludus.train("kill_worlds:Mortal", preset="none", settings=given, on_update=on_update)

    train.left, train.marked = left, tmp_path.name
    yield train
    assert alive(tmp_path.name) == []
    gc.collect()  # an exception's frames may hold views of the shared memory
    assert open_fds() <= before
    assert left_behind(memory) == []


def test_workers_that_fail_are_told_in_the_log_and_the_run_goes_on(mortal):
    seen = []

    def fail_next(values):
        seen.append((len(alive(mortal.marked)), open_sockets(alive(mortal.marked))))
        if len(seen) <= len(SIGNS):
            (mortal.left / list(SIGNS)[len(seen) - 1]).touch()

    result = mortal(fail_next)
    assert (result.steps >= 512, result.reason) == (True, "all steps done")
    assert all(look == (3, []) for look in seen), seen  # server and workers; nothing that listens
    log = (result.run / "log.txt").read_text()
    for how, sign in SIGNS.items():
        report = re.search(REPORT.format(sign=re.escape(sign), how=how), log, re.DOTALL)
        assert report, log
        row, seed, action, between, own_seed, own_action = report.groups()
        assert int(row) < 4
        assert (seed, action) == (own_seed, own_action)
        assert ("kill_worlds.py" in between) == (how == "raise")
        assert "End of its stderr" in between
    assert fingerprint(result.run)


def test_too_many_restarts_end_the_run_with_a_sentence_and_all_saved(mortal):
    def fail_later(values):
        if values["updates"] == 3:
            for number in range(100):
                (mortal.left / f"exit-{number}").touch()

    with pytest.raises(UserError, match=r"more than 2 environment workers failed \(env.max_restarts\)") as caught:
        mortal(fail_later, **{"env.max_restarts": 2, "checkpoint_every": 0})
    assert "\n" not in str(caught.value)
    assert "raise env.max_restarts" in str(caught.value)
    (folder,) = mortal.left.parent.glob("runs/*/*")
    step = load_newest(RunDirectory(folder), pytest.fail)[1]["step"]
    assert f"saved at step {step:,}" in (folder / "log.txt").read_text()
    assert step > 100
    for token in mortal.left.iterdir():
        token.unlink()
    assert ludus.resume(folder).steps >= 512


@pytest.mark.parametrize("how", ["ends", "stops", "raises"])
@pytest.mark.parametrize("backend", ["simple", "subproc"])
def test_what_environments_start_ends_with_the_run(tmp_path, backend, how):
    left, note = tmp_path / "left", tmp_path / "note"
    left.mkdir()
    note.mkdir()
    settings = TINY | {"env.num": 2, "env.backend": backend, "agent.minibatches": 2, "threads": 1}
    settings |= {"env.options": (f"left='{left}'", f"note='{note}'"), "runs": str(tmp_path / "runs")}
    if backend == "subproc":
        settings |= {"env.workers": 2, "env.max_restarts": 0}

    def hook(values):
        if how == "stops":
            signal.raise_signal(signal.SIGTERM)
        if how == "raises":
            (left / "raise").touch()

    mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    if how == "raises":
        with pytest.raises(UserError, match="the wheel fell off"):
            ludus.train("kill_worlds:Serves", preset="none", settings=settings, on_update=hook)
    else:
        ludus.train("kill_worlds:Serves", preset="none", settings=settings, on_update=hook)
    started = {int(file.name) for file in note.iterdir()}
    assert len(started) >= 2
    assert not started & running_processes().keys()
    assert mine.poll() is None
    mine.kill()
    mine.wait()


def test_a_run_stopped_before_its_last_evaluation_is_not_over(tmp_path):
    settings = TINY | {"checkpoint_every": 1, "threads": 1}

    def stop(values):
        if values["step"] >= TINY["nb_step"]:
            signal.raise_signal(signal.SIGTERM)

    straight, other = (
        ludus.train("CartPole-v1", preset="none", seed=seed, settings=settings | {"runs": str(tmp_path / str(seed))})
        for seed in (0, 1)
    )
    stopped = ludus.train("CartPole-v1", preset="none", settings=settings | {"runs": str(tmp_path)}, on_update=stop)
    assert stopped.evaluation is None
    resumed = ludus.resume(stopped.run)
    assert resumed.evaluation == straight.evaluation
    assert fingerprint(resumed.run) == fingerprint(straight.run) != fingerprint(other.run)
    assert ludus.resume(stopped.run).reason.startswith("complete: ")


def test_a_socket_that_others_could_reach_is_seen(tmp_path):
    """What finds none in the tests above does find some."""
    own = os.getpid()
    before = open_sockets([own])
    near, far = socket.socketpair()
    with near, far:
        assert open_sockets([own]) == before
    with socket.socket() as listening, socket.socket(socket.AF_UNIX) as named:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        named.bind(str(tmp_path / "socket"))
        found = set(open_sockets([own])) - set(before)
        assert {words.split()[0] for words in found} == {"tcp", "unix"}
        assert any("listening" in words for words in found)


def test_what_environments_of_evaluation_start_ends_with_the_evaluation(tmp_path):
    left, note = tmp_path / "left", tmp_path / "note"
    left.mkdir()
    note.mkdir()
    settings = TINY | {"env.num": 2, "env.backend": "simple", "agent.minibatches": 2, "threads": 1}
    settings |= {"env.options": (f"left='{left}'", f"note='{note}'"), "runs": str(tmp_path / "runs")}
    settings |= {"evaluation.every": 16, "evaluation.episodes": 2, "nb_step": 64}
    alive = []

    def hook(values):
        alive.append(len({int(file.name) for file in note.iterdir()} & running_processes().keys()))

    ludus.train("kill_worlds:Serves", preset="none", settings=settings, on_update=hook)
    assert len(list(note.iterdir())) >= 6
    assert max(alive) == 2  # those of training
