"""Evaluations of episodes that are long, or have no end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from containers_setup import COUNTING, make_worker, train

from ludus.containers import evaluate
from ludus.containers.local import LocalWorker
from ludus.core.errors import UserError
from ludus.environments.toy import CountingEnv, Floats, Info


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose patience after 20 and 50 steps."""
    monkeypatch.setattr(evaluate, "LONG", 20)
    monkeypatch.setattr(evaluate, "LONGEST", 50)


def listen(worker: LocalWorker) -> list[str]:
    """Return the list to which warnings of evaluations are added."""
    warnings: list[str] = []
    worker.evaluator.on_warning = warnings.append
    return warnings


def test_episodes_without_an_end_are_warned_of_once_and_refused() -> None:
    worker = make_worker(COUNTING, env__options=("length=1000000",))
    warnings = listen(worker)
    for _ in range(2):
        with pytest.raises(UserError, match=r"unfinished episodes after 50 steps; set env.max_episode_steps"):
            worker.evaluator.run(worker.agent, worker.device)
    assert len(warnings) == 1
    assert warnings[0].startswith("No episode of an evaluation has ended in 20 steps, and it goes on for up to 50; if")
    worker.close()


def test_long_episodes_that_end_are_counted() -> None:
    worker = make_worker(COUNTING, env__options=("length=45",), evaluation__episodes=8)
    warnings = listen(worker)
    evaluation = worker.evaluator.run(worker.agent, worker.device)
    assert evaluation is not None
    assert evaluation.lengths == [45] * 8
    assert len(warnings) == 1
    worker.close()


def test_episodes_may_be_as_long_as_env_max_episode_steps() -> None:
    limit = {"env__options": ("length=1000000",), "env__max_episode_steps": 70}
    worker = make_worker(COUNTING, evaluation__episodes=8, **limit)
    warnings = listen(worker)
    evaluation = worker.evaluator.run(worker.agent, worker.device)
    assert evaluation is not None
    assert evaluation.lengths == [70] * 8
    assert not warnings
    worker.close()


def test_a_signal_ends_an_evaluation_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "LONGEST", 10**9)
    run = train(tmp_path, f"{__name__}:Interrupted", nb_step=40)
    assert run.reason == "SIGINT was received"
    assert run.evaluation is None
    assert "No episode of an evaluation has ended in 20 steps" in (run.run / "log.txt").read_text()


class Interrupted(CountingEnv):
    """Has no end, and sends one signal, in the evaluation, whose episodes are longer than those of training."""

    sent = False

    def __init__(self) -> None:
        super().__init__(length=10**9)

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, Info]:
        if self._step == 100 and not Interrupted.sent:
            Interrupted.sent = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)
