"""Exact resume of agents that imitate while they act; tests/containers/test_containers_offline.py has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from containers_setup import TOY, train
from demonstrations import aim, balance, record_to
from test_runs_resume import MANAGERS, assert_same_run
from test_runs_resume_replay import stop_after

import ludus

TARGET = TOY + "TargetEnv"
COMMON: dict[str, Any] = {
    "nb_step": 400,
    "agent__rollout": 8,
    "agent__minibatches": 2,
    "evaluation__every": 100,
    "log_every": 50,
    "checkpoint_every": 100,
}
LSTM: dict[str, Any] = {"network__body": "lstm", "agent__sequence": 6, "agent__burn_in": 3, "agent__batch_size": 24}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gail": (TARGET, "gail", {}),
    "gail, vector": ("CartPole-v1", "gail", MANAGERS["vector"]),
    "gail_trpo": (TARGET, "gail_trpo", {}),
    "dagger": (TARGET, "dagger", {"agent__updates": 3, "agent__labels": 150}),
    "dagger, recurrent teacher": (TARGET, "dagger", {"agent__updates": 3}),
    "dagger, lstm": (TARGET, "dagger", LSTM | {"agent__updates": 3, "agent__labels": 150}),
}
SLOW = ("gail, vector", "gail_trpo", "dagger, recurrent teacher")


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in CASES])
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(case: str, tmp_path: Path) -> None:
    environment, agent, changes = CASES[case]
    settings = COMMON | changes
    if agent == "dagger":
        del settings["agent__minibatches"]
        body = {"network__body": "lstm"} if "recurrent" in case else {}
        settings["agent__teacher"] = str(train(tmp_path / "teacher", environment, **body).run)
    else:
        expert = balance if environment == "CartPole-v1" else aim
        settings |= {"agent__discriminator_updates": 2, "agent__discriminator_batch": 16}
        settings["data"] = record_to(tmp_path / "x.npz", environment, expert, 5)
    straight = train(tmp_path / "straight", environment, agent, **settings).run
    stopped = train(tmp_path / "stopped", environment, agent, stop_after("step", 400 / 3), **settings)
    assert stopped.reason.startswith("SIG")
    assert 0 < stopped.steps < 400
    assert_same_run(straight, ludus.resume(stopped.run).run)
