"""Whole runs of two ranks: failures of one end all, and a resume is exact."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers_setup import dotted, saved, small, train
from test_runs_resume import assert_same_run, metrics, stop_at

import ludus
from benchmarks.soak_watch import MARK, alive
from ludus.core.errors import UserError

DISTRIB: dict[str, Any] = {
    "container": "distrib",
    "distrib__ranks": 2,
    "nb_step": 400,
    "agent__normalize_observation": True,
    "agent__normalize_reward": True,
    "evaluation__every": 100,
    "log_every": 50,
    "checkpoint_every": 100,
}
REPLAY: dict[str, Any] = {"agent__warmup": 64, "agent__replay": 300, "agent__batch_size": 8}
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sac": ("Pendulum-v1", REPLAY | {"agent__normalize_observation": True}),
    "r2d2": ("CartPole-v1", REPLAY | {"agent__sequence": 4, "agent__burn_in": 2, "agent__overlap": 0}),
    "ddpg": ("Pendulum-v1", REPLAY | {"agent__noise": "parameter"}),
    "acer": ("CartPole-v1", {"agent__rollout": 8, "agent__warmup": 64}),
}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that every process has ended and every temporary file is deleted."""
    monkeypatch.setenv(MARK, tmp_path.name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert alive(tmp_path.name) == []
    assert list(tmp_path.glob("ludus-ranks-*")) == []


def only_run(folder: Path) -> Path:
    (config,) = folder.glob("*/*/config.toml")
    return config.parent


def kill_rank_at(update: int) -> Any:
    def hook(values: Any, worker: Any) -> None:
        if values["updates"] == update:
            os.kill(worker._processes._processes[0].pid, signal.SIGKILL)

    return hook


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_and_that_is_stopped_resumes_exactly(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", "CartPole-v1", **DISTRIB)
    assert straight.steps >= 400
    lines = metrics(straight.run)
    assert any("return" in line and "evaluation/mean" not in line for line in lines)
    with pytest.raises(UserError, match=r"Rank 1 \(process \d+\) was killed by SIGKILL; `ludus resume` continues"):
        train(tmp_path / "broken", "CartPole-v1", "ppo", kill_rank_at(5), **DISTRIB)
    broken = only_run(tmp_path / "broken")
    assert ludus.resume(broken, on_update=stop_at(8)).reason == "SIGTERM was received"
    assert ludus.resume(broken).reason == "all steps done"
    assert_same_run(straight.run, broken)


def test_an_exception_in_a_rank_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    home = {"env__options": (f"home={os.getpid()}",)}
    with pytest.raises(UserError, match=r"Rank 1: .*step raised ValueError: the wheel fell off") as caught:
        train(tmp_path / "runs", "distrib_worlds:FailsElsewhere", **DISTRIB | home)
    assert "distrib_worlds.py" in caught.value.details
    assert "gloo" not in str(caught.value).lower()


def test_a_killed_rank_ends_the_run_and_leaves_its_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Rank 1 \(process \d+\) was killed by SIGKILL; `ludus resume` continues"):
        train(tmp_path / "runs", "CartPole-v1", "ppo", kill_rank_at(5), **DISTRIB)
    run = only_run(tmp_path / "runs")
    assert "a resume continues from the last checkpoint" in (run / "log.txt").read_text()
    state = saved(run)
    assert 100 <= state["counters"]["step"] < 160  # the first update at or after 100 steps
    assert len(state["ranks"]) == 1
    assert not state["ranks"][0]["agent"]  # equal to that of rank 0, so it is not saved twice


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_every_kind_of_agent_resumes_exactly(agent: str, tmp_path: Path) -> None:
    environment, changes = AGENTS[agent]
    settings = {key: x for key, x in DISTRIB.items() if not key.startswith("agent__")} | changes
    straight = train(tmp_path / "straight", environment, agent, **settings).run
    stopped = train(tmp_path / "stopped", environment, agent, stop_at(20), **settings)
    assert stopped.reason == "SIGTERM was received"
    ludus.resume(stopped.run)
    assert_same_run(straight, stopped.run)


@pytest.mark.slow
def test_compiled_ranks_learn_what_eager_ones_learn(tmp_path: Path) -> None:
    import torch

    eager, compiled = (
        saved(train(tmp_path / how, "CartPole-v1", **DISTRIB, compile=how).run)["agent"] for how in ("off", "on")
    )
    for name, x in eager.items():
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(compiled[name], x, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_second_signal_ends_ranks_that_hang(tmp_path: Path) -> None:
    home = {"env__options": (f"home={os.getpid()}",)}

    def hook(values: Any) -> None:
        if values["updates"] == 2:  # the other rank hangs in the next rollout
            subprocess.Popen(["sh", "-c", f"sleep 2; kill -TERM {os.getpid()}; sleep 1; kill -TERM {os.getpid()}"])

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "runs", "distrib_worlds:HangsElsewhere", "ppo", hook, **DISTRIB | home)


def flag(key: str, value: Any) -> list[str]:
    name = f"--{key.replace('_', '-')}"
    return [name] if value is True else [name, *map(str, value if isinstance(value, tuple) else (value,))]


@pytest.mark.slow
def test_torchrun_starts_the_same_run(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", "CartPole-v1", **DISTRIB).run
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words += ["ludus.cli.main"]
    flags = small("ppo") | dotted({key: x for key, x in DISTRIB.items() if key != "distrib__ranks"})
    flags |= {"runs": tmp_path / "torchrun", "nb_step": 400, "preset": "none"}
    given = [word for key, x in flags.items() if key != "network.lstm_size" for word in flag(key, x)]
    subprocess.run([*words, "train", "CartPole-v1", "--quiet", *given], check=True)
    run = only_run(tmp_path / "torchrun")
    assert_same_run(straight, run)
    subprocess.run([*words, "resume", str(run), "--nb-step", "600"], check=True)
    assert ludus.resume(straight, nb_step=600).steps == saved(run)["counters"]["step"]
    assert_same_run(straight, run)
