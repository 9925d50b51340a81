import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.errors import UserError
from ludus.logging.logfile import LogFile
from ludus.runs.folder import RunDirectory, _safe


def made(root: Path, env: str = "CartPole-v1", agent: str = "ppo") -> RunDirectory:
    run = RunDirectory.create(root, env, agent)
    run.config.write_text("")
    return run


@contextmanager
def training(run: RunDirectory) -> Iterator[None]:
    with run.lock():
        run.mark_used()
        yield


def test_runs_of_one_second_get_folders_of_their_own_and_the_last_is_latest(tmp_path):
    runs = [made(tmp_path) for _ in range(12)]
    assert len({run.path for run in runs}) == 12
    for run in runs:
        with training(run):
            pass
    assert RunDirectory.open("latest", tmp_path).path == runs[-1].path


def test_latest_is_the_run_that_was_started_resumed_or_ended_last(tmp_path):
    first, second = made(tmp_path, "A"), made(tmp_path, "B")
    first.path = first.path.rename(first.path.with_name("20250101-000000-ppo"))
    first, second = RunDirectory(first.path), RunDirectory(second.path)
    for run in (second, first):  # a resume of the older one
        with training(run):
            pass
    assert RunDirectory.open("latest", tmp_path).path == first.path
    with training(first):
        with training(second):
            assert RunDirectory.open("latest", tmp_path).path == second.path
        assert RunDirectory.open("latest", tmp_path).path == second.path
    assert RunDirectory.open("latest", tmp_path).path == first.path  # it ended last
    with second.lock():  # without training in it
        assert RunDirectory.open("latest", tmp_path).path == first.path
    assert RunDirectory.open("latest", tmp_path).path == first.path
    os.utime(second.config, ns=(2**62, 2**62))  # an edit of its settings is no use of it
    with pytest.raises(UserError), first.lock(), first.lock():
        pass
    RunDirectory.create(tmp_path, "C", "ppo")  # died before it had a config
    assert RunDirectory.open("latest", tmp_path).path == first.path
    assert RunDirectory.open("A/20250101-000000-ppo", tmp_path).path == first.path


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "my_pkg.envs:MyEnv", "../../etc", "a\\b c", "..", "", "/"])
def test_any_name_makes_one_folder_below_the_root(tmp_path, env):
    run = RunDirectory.create(tmp_path, env, "pkg.mod:MyAgent")
    assert run.path.parent.parent == tmp_path
    assert run.path.resolve().parent.parent == tmp_path.resolve()
    assert ":" not in run.path.name


@given(st.text())
def test_safe_names_are_plain(name):
    safe = _safe(name)
    assert safe
    assert Path(safe).name == safe
    assert not safe.startswith((".", "-"))


def test_what_is_no_run_is_named_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match="ludus train"):
        RunDirectory.open("latest", tmp_path)
    run = made(tmp_path)
    with pytest.raises(UserError, match=f'Did you mean "{run.path}"'):
        RunDirectory.open(str(run.path)[:-1], tmp_path)
    with pytest.raises(UserError, match=r"no config\.toml"):
        RunDirectory.open(Path(__file__).parent, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        RunDirectory.create(tmp_path / "file", "CartPole-v1", "ppo")


def test_checkpoints_are_ordered_by_number(tmp_path):
    run = made(tmp_path)
    for name in ("step_9", "step_10", ".tmp-step_11-5", "step_x", "notes"):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.latest_checkpoint() == run.checkpoints / "step_10"
    assert run.best_checkpoint() is None
    run.best.mkdir()
    assert run.best_checkpoint() == run.best


def test_the_log_has_a_time_on_every_entry(tmp_path):
    log = LogFile(tmp_path / "log.txt")
    log.note("started\nwith two lines")
    log.warning("odd \udc80 byte")
    first, second, third = (tmp_path / "log.txt").read_text().splitlines()
    assert first.endswith(" note    started")
    assert second.strip() == "with two lines"
    assert " warning odd " in third


def test_a_folder_of_runs_means_its_latest(tmp_path):
    names = (("A", "20250101-000000-ppo"), ("A", "20250103-000000-ppo"), ("B", "20250102-000000-ppo"))
    for age, (env, name) in enumerate(names):
        (tmp_path / env / name).mkdir(parents=True)
        (tmp_path / env / name / "config.toml").write_text("")
        os.utime(tmp_path / env / name / "config.toml", ns=(age, age))  # a copy without its lock
    assert RunDirectory.open(tmp_path / "A").path.name == "20250103-000000-ppo"
    assert RunDirectory.open("B", tmp_path).path.name == "20250102-000000-ppo"
    assert RunDirectory.open(tmp_path).path == RunDirectory.open("latest", tmp_path).path


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ("my_module:<lambda>", "my_module-lambda"),
        ("my_module:main.<locals>.<lambda>", "my_module-main.lambda"),
        ("my_module:main.<locals>.Maze", "my_module-main.Maze"),
        ("my_module:Maze.<partial>", "my_module-Maze.partial"),
    ],
)
def test_what_has_no_name_of_its_own_still_makes_a_readable_folder(tmp_path, env, folder):
    assert RunDirectory.create(tmp_path, env, "ppo").path.parent.name == folder


def test_a_torn_last_line_of_the_log_is_ended_first_and_a_link_is_not_followed(tmp_path):
    (tmp_path / "log.txt").write_text("torn by a kil")
    LogFile(tmp_path / "log.txt").note("resumed")
    torn, entry = (tmp_path / "log.txt").read_text().splitlines()
    assert torn == "torn by a kil"
    assert entry.endswith(" note    resumed")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="is a link"):
        LogFile(tmp_path / "link").note("x")
    assert not (tmp_path / "precious").exists()


def test_writing_is_one_at_a_time_and_the_lock_is_no_run_and_no_checkpoint(tmp_path):
    run = made(tmp_path)
    with run.lock(), pytest.raises(UserError, match=f"process {os.getpid()}: wait"), run.lock():
        pass
    with run.lock():
        assert RunDirectory.open("latest", tmp_path).path == run.path
        assert run.best_checkpoint() is run.latest_checkpoint() is None


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with made(tmp_path).lock():
        pass
