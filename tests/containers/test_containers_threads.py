from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from containers_setup import make_worker, train
from threadpoolctl import threadpool_info

import ludus
from ludus.containers import build
from ludus.containers.threads import requested_threads, use_threads
from ludus.parallel.process import child_environ
from ludus.parallel.resources import cores
from ludus.settings.config_file import read_config, read_origins


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


class Watched(gymnasium.Env[np.ndarray, np.int64]):
    """Notes how many threads torch and BLAS may use while a run trains."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    seen: ClassVar[set[tuple[int, frozenset[int]]]] = set()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(3, np.float32), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.seen.add((torch.get_num_threads(), frozenset(blas_threads())))
        return np.zeros(3, np.float32), 0.0, False, True, {}


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, 0), ("1", 1), ("3", 3), ("4,2", 4), (" 2 ", 2), ("", 0), ("0", 0), ("-1", 0), ("all", 0)],
)
def test_omp_num_threads_is_read_as_openmp_reads_it(
    variable: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert requested_threads() == expected


def test_blas_has_one_thread_and_both_get_the_old_number_back() -> None:
    before = torch.get_num_threads(), blas_threads()
    for number in (1, 2):
        with use_threads(number):
            assert (torch.get_num_threads(), blas_threads()) == (number, {1})
    assert (torch.get_num_threads(), blas_threads()) == before


@pytest.mark.parametrize(
    ("variable", "given", "expected", "origin"),
    [(None, 0, 1, "chosen"), ("2", 0, 2, "OMP_NUM_THREADS"), ("2", 1, 1, "argument"), ("1", 2, 2, "argument")],
)
def test_a_run_trains_with_the_threads_that_were_asked_for(
    variable: str | None, given: int, expected: int, origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    Watched.seen.clear()
    result = train(tmp_path, Watched, threads=given, nb_step=32)
    assert Watched.seen == {(expected, frozenset({1}))}
    assert read_config(result.run / "config.toml")["threads"] == expected
    assert read_origins(result.run / "config.toml")["threads"] == origin
    assert f"cpu, {expected} thread" in (result.run / "log.txt").read_text()


def test_a_resume_keeps_the_threads_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    result = train(tmp_path, Watched, threads=0, nb_step=32)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Watched.seen.clear()
    ludus.resume(result.run, nb_step=64, environment=Watched)
    assert Watched.seen == {(2, frozenset({1}))}
    assert read_config(result.run / "config.toml")["threads"] == 2


def test_cnns_take_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Linear(2, 2))
    assert build.default_threads(module) == cores()
    assert build.default_threads(torch.nn.Linear(2, 2)) == 1
    assert build.default_threads(module.to("meta")) == 1  # another device computes


WIDE = {"env__num": 32, "network__hidden": (64, 64)}


@pytest.mark.parametrize(
    ("environment", "agent", "changes", "expected"),
    [
        ("CartPole-v1", "ppo", {"agent__rollout": 256} | WIDE, 1),
        ("CartPole-v1", "ppo", {"agent__rollout": 512} | WIDE, 2),
        ("CartPole-v1", "ppo", {"agent__rollout": 512, "network__body": "lstm"} | WIDE, 1),
        ("Pendulum-v1", "sac", {"network__hidden": (256, 256)}, 2),
        ("Pendulum-v1", "sac", {"network__hidden": (512, 512)}, 4),
        ("CartPole-v1", "dqn", {"network__hidden": (256, 256), "agent__batch_size": 32}, 1),
    ],
)
def test_mlps_with_large_batches_or_layers_take_more_threads(
    environment: str, agent: str, changes: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cores", lambda: 4)
    batch = {"agent__batch_size": 256, "agent__replay": 1000} if agent == "sac" else {}
    worker = make_worker(environment, agent, threads=0, **batch | changes)
    assert build.choose_engines(worker.settings, worker.agent).threads == expected
    worker.close()
    worker.manager.close()


@pytest.mark.parametrize(("variable", "expected"), [(None, "1"), ("3", "3")])
def test_worker_processes_start_with_one_thread_or_omp_num_threads(
    variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    environ = child_environ()
    code = "import numpy; from threadpoolctl import threadpool_info as i; print({p['num_threads'] for p in i()})"
    told = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == f"{{{min(int(expected), os.cpu_count() or 1)}}}"
