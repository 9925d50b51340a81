"""The offline container: updates are steps, environments are stepped in evaluations alone, and a resume is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from containers_setup import train
from demonstrations import TOY, aim, record, record_to
from test_runs_resume import assert_same_run, metrics
from test_runs_resume_replay import stop_after

import ludus
from ludus.cli.main import main
from ludus.core.errors import UserError
from ludus.data.npz import save_npz
from ludus.settings.settings import resolve_settings

TARGET = TOY + "TargetEnv"
RUN: dict[str, Any] = {"nb_step": 300, "evaluation__every": 100, "log_every": 50, "checkpoint_every": 60}


def test_steps_are_updates(tmp_path: Path) -> None:
    data = record_to(tmp_path / "x.npz", TARGET, aim, 5)
    seen: list[Any] = []
    result = train(tmp_path, TARGET, "bc", lambda values, worker: seen.append((dict(values), worker)), data=data, **RUN)
    assert result.steps == 300
    assert [values["updates"] for values, _ in seen] == [float(x) for x in range(20, 301, 20)]
    worker = seen[-1][1]
    assert worker.manager.batch == 1
    assert worker.manager.nb_calls == 0
    assert [line["step"] for line in metrics(result.run) if "evaluation/mean" in line] == [100, 200, 300]
    assert "20 recorded steps of 5 episodes" in (result.run / "log.txt").read_text()


def test_a_run_ends_at_nb_step(tmp_path: Path) -> None:
    data = record_to(tmp_path / "x.npz", TARGET, aim, 5)
    assert train(tmp_path, TARGET, "bc", data=data, nb_step=33).steps == 33


@pytest.mark.parametrize("body", ["mlp", "lstm"])
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = record_to(tmp_path / "x.npz", TARGET, aim, 5)
    memory = {"network__body": "lstm", "agent__batch_size": 24, "agent__sequence": 6, "agent__burn_in": 3}
    settings = RUN | (memory | {"nb_step": 160} if body == "lstm" else {})
    straight = train(tmp_path / "straight", TARGET, "bc", data=data, **settings).run
    monkeypatch.chdir(tmp_path)
    stopped = train(tmp_path / "stopped", TARGET, "bc", stop_after("updates", 100), data="x.npz", **settings)
    assert stopped.reason.startswith("SIG")
    assert 60 < stopped.steps < 300
    monkeypatch.chdir("/")  # the run has the full path of its data
    assert_same_run(straight, ludus.resume(stopped.run).run)


def test_a_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    data = record_to(tmp_path / "x.npz", TARGET, aim, 5)
    stopped = train(tmp_path / "runs", TARGET, "bc", stop_after("updates", 100), data=data, **RUN)
    save_npz(data, record(TARGET, aim, 5, seed=1))
    with pytest.raises(UserError, match="others than those that the run learned from"):
        ludus.resume(stopped.run)
    Path(data).unlink()
    with pytest.raises(UserError, match="does not exist"):
        ludus.resume(stopped.run)


def test_the_container_is_chosen_by_the_agent() -> None:
    resolved = resolve_settings(TARGET, "bc", overrides={"data": "x.npz"})
    assert resolved.settings.container == "offline"
    assert resolved.settings.data.path == "x.npz"
    assert resolved.settings.evaluation.every == 10_000
    assert resolve_settings(TARGET, "gail", overrides={"data": "x.npz"}).settings.container == "local"


def test_check_refuses_what_training_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = record_to(tmp_path / "x.npz", TARGET, aim, 5)
    assert main(["check", TARGET, "--agent", "bc", "--data", data]) == 0
    capsys.readouterr()
    assert main(["check", "CartPole-v1", "--agent", "bc", "--data", data]) == 2
    assert "has shape (2,)" in " ".join(capsys.readouterr().out.split())
