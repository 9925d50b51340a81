"""``ludus list runs``, and names and tags of runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.cli.list import age
from ludus.cli.main import main
from ludus.runs.summary import read_summary

QUICK = ["--env.num", "2", "--agent.rollout", "8", "--evaluation.episodes", "2", "--quiet", "--compile", "off"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    """The lines of the table by their columns, without the header."""
    capsys.readouterr()
    assert main(["list", "runs", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:-2]]


def test_runs_with_names_and_tags(capsys: pytest.CaptureFixture[str]) -> None:
    first = ["--nb-step", "32", "--seed", "7", "--name", "Baseline 1", "--tag", "paper", "--tag", "small"]
    assert main(["train", "CartPole-v1", *QUICK, *first]) == 0
    assert (
        main(["train", "MountainCar-v0", *QUICK, "--nb-step", "16", "--env.max-episode-steps", "20", "--tags", "paper"])
        == 0
    )
    one, two = listed(capsys)
    assert one[:3] == ["CartPole-v1", "ppo", "7"]
    assert int(one[4]) >= 32
    assert one[5] == "complete"
    assert one[6].endswith(("s", "m"))
    assert one[7].startswith("CartPole-v1/")
    assert one[7].endswith("-ppo-Baseline-1")
    assert one[8] == "paper, small"
    assert float(one[3]) > 0
    assert two[0] == "MountainCar-v0"
    assert listed(capsys, "--tag", "paper", "--tag", "small") == [one]
    assert listed(capsys, "--tags", "paper") == [one, two]
    assert listed(capsys, "--name", "base") == []
    assert listed(capsys, "--name", "Base") == [one]
    assert main(["evaluate", one[7], "--episodes", "1"]) == 0  # as it is shown, it can be typed


def test_where_there_is_none_a_sentence_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "runs"]) == 0
    assert 'There is no run in "runs" yet' in capsys.readouterr().out
    assert main(["list", "--tag", "x"]) == 2
    assert "are for `ludus list runs`" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--name", "a\x1b[31mb"], ["--tag", ""], ["--name", "x" * 81]])
def test_names_that_cannot_be_shown_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "CartPole-v1", "--nb-step", "16", *QUICK, *words]) == 2
    assert "printable characters" in capsys.readouterr().err
    assert not Path("runs").exists()


SETTINGS: dict[str, Any] = {"env.num": 2, "agent.rollout": 8, "evaluation.episodes": 2, "quiet": True}


def state_of(run: Path) -> str:
    found = read_summary(run)
    assert found is not None
    return found.state


def test_states_of_runs() -> None:
    states = []

    def hook(numbers: Any, worker: Any) -> None:
        states.append(state_of(worker.reporter.run.path))
        if len(states) == 2:
            raise ludus.Stop("enough")

    stopped = ludus.train("CartPole-v1", preset="none", nb_step=100, settings=SETTINGS, on_update=hook)
    assert states == ["running"] * 2
    assert state_of(stopped.run) == "stopped"
    ludus.resume(stopped.run)
    assert state_of(stopped.run) == "complete"

    def fail(numbers: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        ludus.train("CartPole-v1", preset="none", nb_step=100, settings=SETTINGS | {"name": "bad"}, on_update=fail)
    (failed,) = Path("runs/CartPole-v1").glob("*-bad")
    assert state_of(failed) == "failed"


def test_a_killed_run_is_told_from_a_running_one(tmp_path: Path) -> None:
    words = ["train", "CartPole-v1", "--nb-step", "100_000_000", *QUICK]
    environment = os.environ | {"PYTHONPATH": str(Path(ludus.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-m", "ludus.cli.main", *words], env=environment)
    try:
        while not (found := list(tmp_path.glob("runs/*/*/summary.json"))):
            assert process.poll() is None
            time.sleep(0.05)
        run = found[0].parent
        assert state_of(run) == "running"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert state_of(run) == "killed"


def test_ages_are_in_the_largest_unit() -> None:
    now = time.time()
    assert [age(now - x) for x in (90, 7_300, 400_000)] == ["1m", "2h", "4d"]
    assert age(now + 100) == "0s"


def test_hundreds_of_runs_are_listed_without_reading_their_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ludus.runs.summary as module

    about = {"environment": "M", "agent": "ppo", "name": "", "tags": [], "steps": 1, "nb_step": 1, "best": None}
    for seed in range(300):
        run = tmp_path / "runs" / "M" / f"20260101-000000-ppo-{seed}"
        run.mkdir(parents=True)
        (run / "config.toml").touch()
        (run / "summary.json").write_text(json.dumps(about | {"seed": seed, "state": "complete", "reason": ""}))
    monkeypatch.setattr(module, "read_config", lambda path: pytest.fail("a config.toml was read"))
    assert len(listed(capsys)) == 300


def test_what_a_summary_of_others_holds_does_nothing_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "M" / "20260101-000000-ppo"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    about = {"environment": "M\x1b[2J", "agent": "p\np", "name": "", "tags": ["\u202e"], "steps": 1, "nb_step": 1}
    (run / "summary.json").write_text(json.dumps(about | {"best": None, "seed": 1, "state": "x", "reason": ""}))
    assert main(["list", "runs"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert r"M\x1b[2J     p p" in out
    assert "unknown" in out
