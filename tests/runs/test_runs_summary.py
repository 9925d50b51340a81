"""What a list of runs reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ludus.core.errors import UserError
from ludus.runs.folder import RunDirectory
from ludus.runs.summary import FILE, Summary, list_runs, read_summary, write_summary

SUMMARY = Summary(environment="Maze", agent="ppo", seed=3, name="first", tags=("a", "b"), steps=100, nb_step=200)


def new(root: Path, name: str = "", state: str = "running", best: float | None = 1.5) -> RunDirectory:
    run = RunDirectory.create(root, "Maze", "ppo", name)
    run.config.write_text('seed = 3\nname = "of the settings"\n\n[env]\nid = "Maze"\n\n[agent]\nname = "ppo"\n')
    write_summary(run, Summary(**{**vars(SUMMARY), "state": state, "best": best}))
    return run


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = new(tmp_path, state="complete")
    assert read_summary(run.path) == Summary(**{**vars(SUMMARY), "state": "complete", "best": 1.5})


def test_a_run_that_is_written_is_running_and_else_it_was_killed(tmp_path: Path) -> None:
    run = new(tmp_path)
    with run.lock():
        found = read_summary(run.path)
        assert found is not None
        assert found.state == "running"
        with pytest.raises(UserError, match="is being written"), run.lock():
            pass
    found = read_summary(run.path)
    assert found is not None
    assert found.state == "killed"


def test_the_steps_of_a_run_that_did_not_end_are_those_of_its_metrics(tmp_path: Path) -> None:
    run = new(tmp_path)
    lines = [json.dumps({"step": step, "time": 0.0}) for step in (50, 150)]
    run.metrics.write_text("\n".join(lines) + '\n{"step": 17')  # the last one is not whole
    found = read_summary(run.path)
    assert found is not None
    assert found.steps == 150


BAD = [b"", b"{", b"[]", b'{"environment": 1}', b"null", b"\xff", b'{"seed": "x"}', b"[" * 100_000]


@pytest.mark.parametrize("content", BAD)
def test_a_run_without_a_readable_summary_is_told_by_its_settings(content: bytes, tmp_path: Path) -> None:
    run = new(tmp_path)
    (run.path / FILE).write_bytes(content)
    (run.checkpoints / "step_70").mkdir(parents=True)
    found = read_summary(run.path)
    assert found is not None
    assert (found.environment, found.agent, found.seed, found.name) == ("Maze", "ppo", 3, "of the settings")
    assert (found.steps, found.best, found.state) == (70, None, "unknown")


def test_what_cannot_be_read_at_all_is_left_out(tmp_path: Path) -> None:
    run, other = new(tmp_path), new(tmp_path)
    (run.path / FILE).unlink()
    run.config.write_text("not toml")
    assert [found.path for found in list_runs(tmp_path)] == [other.path]
    assert list(list_runs(tmp_path / "nowhere")) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    run = new(tmp_path / "runs", state="complete")
    secret = tmp_path / "elsewhere.json"
    os.replace(run.path / FILE, secret)
    (run.path / FILE).symlink_to(secret)
    found = read_summary(run.path)
    assert found is not None
    assert found.state == "unknown"


def test_the_name_of_a_run_is_the_end_of_its_folder_and_stays_inside(tmp_path: Path) -> None:
    assert new(tmp_path, "first try").path.name.endswith("-ppo-first-try")
    for name in ("../../out", "a/b", "..", "\n", "x" * 300):
        path = new(tmp_path, name).path
        assert path.parent == tmp_path / "Maze"
        assert len(path.name) < 200
