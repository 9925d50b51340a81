"""The first Ctrl-C ends a run in which an environment hangs, or whose update is being compiled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from containers_setup import make_worker, saved, train
from signal_worlds import Hangs
from test_runs_resume import assert_same_run

import ludus
from ludus.containers import signals
from ludus.containers.signals import StopOnSignals, stop_runs, without_signals
from ludus.runs.folder import RunDirectory

SETTINGS: dict[str, Any] = {"nb_step": 200, "env__num": 2, "env__backend": "simple", "log_every": 50}


@pytest.fixture
def once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file for one hang."""
    monkeypatch.setattr(signals, "PATIENCE", 0.3)  # what hangs never returns, so any time will do
    file = tmp_path / "once"
    file.touch()
    return file


@pytest.mark.parametrize("every", [1, 0])
def test_a_hang_in_a_rollout_ends_on_the_first_signal(tmp_path: Path, once: Path, every: int) -> None:
    settings = SETTINGS | {"checkpoint_every": every}
    straight = train(tmp_path / "straight", Hangs, **settings).run
    hung = train(tmp_path / "hung", partial(Hangs, once=str(once)), **settings)
    assert hung.reason == "SIGINT was received; the environment did not respond"
    assert 0 < hung.steps < 100
    log = (hung.run / "log.txt").read_text()
    assert "time.sleep(1000)" in log
    exact = f"The environment does not respond; already saved at step {hung.steps}, and a resume is exact."
    new = f"The environment does not respond; saved at step {hung.steps}; a resume starts new"
    assert (exact in log, new in log) == (bool(every), not every)
    resumed = ludus.resume(hung.run, environment=Hangs)
    assert resumed.steps >= 200
    if every:
        assert_same_run(straight, resumed.run)


def test_a_hang_in_an_evaluation_loses_nothing(tmp_path: Path, once: Path) -> None:
    settings = SETTINGS | {"evaluation__every": 100, "evaluation__episodes": 1}
    straight = train(tmp_path / "straight", Hangs, **settings).run
    made: list[int] = []

    def make() -> Hangs:
        made.append(1)
        return Hangs(at=5, once=str(once) if len(made) > 2 else "")  # the third is evaluation's

    hung = train(tmp_path / "hung", make, **settings)
    assert hung.reason.startswith("SIGINT")
    assert "The environment does not respond; saved at step" in (hung.run / "log.txt").read_text()
    assert saved(hung.run)["manager"] is not None
    assert_same_run(straight, ludus.resume(hung.run, environment=Hangs).run)


def test_before_the_first_update_there_is_nothing_to_save(tmp_path: Path, once: Path) -> None:
    hung = train(tmp_path, partial(Hangs, once=str(once), at=3), **SETTINGS)
    assert hung.reason.startswith("SIGINT")
    assert "nothing was saved, because there was no update yet." in (hung.run / "log.txt").read_text()


def test_an_environment_that_goes_on_slowly_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "PATIENCE", 0.01)
    worker = make_worker("CartPole-v1")
    stop = StopOnSignals(worker, pytest.fail)
    looks = iter(range(5))

    def current_call() -> tuple[int, ...]:
        look = next(looks, 5)
        if look == 5:
            stop._over.set()
        return (look,)

    monkeypatch.setattr(worker, "current_call", current_call)
    stop._watch(signal.SIGINT)
    assert stop._hangs is None
    worker.close()


def test_a_reset_that_is_always_slow_is_waited_for() -> None:
    worker = make_worker("CartPole-v1")
    stop = StopOnSignals(worker, pytest.fail)
    worker.manager.reset(0)
    worker.evaluator.manager.reset(0)
    assert worker.longest_call() > 0
    worker.manager.longest_call = worker.evaluator.manager.longest_call = 0.1
    assert stop._patience() == signals.PATIENCE
    worker.manager.longest_call = 20.0
    assert stop._patience() == 60
    worker.manager.longest_call, worker.evaluator.manager.longest_call = 0.0, 30.0
    worker.evaluator.close()
    assert stop._patience() == 90
    worker.close()


def test_an_environment_that_returned_meanwhile_is_not_interrupted() -> None:
    worker = make_worker("CartPole-v1")
    stop = StopOnSignals(worker, pytest.fail)
    worker.stopping, stop._hangs = "SIGINT was received", (7, 0)
    stop._stop(signal.SIGINT, None)
    assert stop._hangs is None
    assert not stop.hung
    worker.close()


@pytest.mark.parametrize("how", ["asleep", "again"])
@pytest.mark.parametrize("own", [{}, {"agent__n_step": 3, "agent__prioritized": True}, {"env__num": 1}])
def test_a_hang_does_not_lose_the_replay(tmp_path: Path, once: Path, own: dict[str, Any], how: str) -> None:
    settings = SETTINGS | {"agent__warmup": 20, "agent__batch_size": 8, "agent__replay": 100} | own
    hangs = partial(Hangs, once=str(once), how=how)
    if how == "again":
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, hangs, "dqn", **settings, checkpoint_every=0)
    else:
        train(tmp_path, hangs, "dqn", **settings, checkpoint_every=0)
    run = RunDirectory.open("latest", tmp_path).path
    assert saved(run)["manager"] is None
    (track,) = saved(run)["cache"]["groups"]
    resumed = ludus.resume(run, environment=Hangs)
    assert resumed.steps >= 200
    log = (run / "log.txt").read_text()
    assert "restarted at an episode boundary" in log
    assert "The replay was not saved" not in log
    (later,) = saved(run)["cache"]["groups"]
    assert later["time"] > track["time"] >= 39


def test_a_run_in_another_thread_is_stopped_as_by_signals() -> None:
    worker = make_worker("CartPole-v1")
    stop = StopOnSignals(worker, pytest.fail)
    ready, seen = threading.Event(), list[str]()

    def run() -> None:
        with stop.handle():
            ready.set()
            try:
                while True:
                    time.sleep(0.001)
            except KeyboardInterrupt:
                seen.append(worker.stopping)

    assert not stop_runs(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    assert stop_runs(signal.SIGTERM)
    assert worker.stopping == "SIGTERM was received"
    assert seen == []
    assert stop_runs(signal.SIGTERM)  # the second one stops at once
    thread.join()
    assert seen == ["SIGTERM was received"]
    assert not stop_runs(signal.SIGTERM)
    worker.close()


CLI = """
import sys
from ludus.containers import signals
from ludus.cli.main import main
signals.PATIENCE = 0.5
sys.argv = ["ludus", "train", "signal_worlds:Hangs", *sys.argv[1:]]
sys.exit(main())
"""


def hang_on_the_command_line(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "once").touch()
    flags = ["--env.num", "2", "--env.backend", "simple", "--agent.rollout", "8", "--env.options"]
    flags += [f'how="{how}"', f"once='{tmp_path / 'once'}'", "--runs", str(tmp_path), "--compile", "off"]
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CLI, *flags], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 130, done.stderr
    assert RunDirectory.open("latest", tmp_path).latest_checkpoint() is not None
    return done


def test_a_call_that_nothing_interrupts_ends_with_the_command(tmp_path: Path) -> None:
    done = hang_on_the_command_line(tmp_path, "c")
    assert "The environment cannot be interrupted, so this process ends now.\nResume:    ludus " in done.stderr
    assert "; a resume starts new episodes." in done.stdout


@pytest.mark.parametrize("how", ["asleep", pytest.param("again", marks=pytest.mark.slow)])
def test_the_command_says_how_to_go_on_after_a_hang(tmp_path: Path, how: str) -> None:
    done = hang_on_the_command_line(tmp_path, how)
    why = {"asleep": "The environment does not respond", "again": "Stopped immediately"}[how]
    assert f"{why}; saved at step " in done.stdout
    assert done.stdout.count("Resume:") == 1
    assert ("KeyboardInterrupt: the environment did not return" in done.stdout) == (how == "asleep")
    assert "ludus.containers" not in done.stdout + done.stderr
    assert "An error" not in done.stdout
    assert done.stdout.count(" steps (") == 1


def test_what_is_started_apart_does_not_get_the_terminals_signals() -> None:
    """The shell sends itself SIGINT, and lives: the signal is blocked."""

    def compile_something() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "-c", "kill -INT $$; echo alive"], capture_output=True, text=True)

    assert compile_something().stdout == ""
    assert without_signals(compile_something).stdout == "alive\n"
    with pytest.raises(ZeroDivisionError):
        without_signals(lambda: 1 // 0)


@pytest.mark.slow
def test_ctrl_c_while_the_update_is_compiled(tmp_path: Path) -> None:
    """As a terminal sends it, to all processes of the group; standard output is a pipe."""
    command = [sys.executable, "-m", "ludus.cli.main"]
    flags = ["--runs", str(tmp_path), "--compile", "on", "--nb-step", "1000000", "--agent.rollout", "8"]
    environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen(
        [*command, "train", "CartPole-v1", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        preexec_fn=heed,
        process_group=0,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("Compiling the update"):
            break
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate()
    assert child.returncode == 130, err
    assert "Stopping after this update, which is still being compiled" in err
    assert "cannot be compiled" not in out
    run = RunDirectory.open("latest", tmp_path).path
    step = saved(run)["counters"]["step"]
    assert step > 0
    words = [*command, "resume", str(run), "--nb-step", str(step + 64)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    assert f"Resumed at step {step}. Environments were restored exactly." in done.stdout
