"""Exact resume of agents that learn neither as PPO and A2C do nor from a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from containers_setup import train
from test_runs_resume import MANAGERS, assert_same_run
from test_runs_resume_replay import stop_after

import ludus

COMMON: dict[str, Any] = {
    "nb_step": 400,
    "agent__normalize_observation": True,
    "evaluation__every": 100,
    "log_every": 50,
    "checkpoint_every": 100,
}
LSTM: dict[str, Any] = {"network__body": "lstm"}
LONG: dict[str, Any] = {"nb_step": 2_000, "evaluation__every": 0, "checkpoint_every": 500}  # an episode has 200 steps
TEAM: dict[str, Any] = {"agent__warmup": 50, "agent__batch_size": 16, "agent__updates_per_step": 0.25}
NOISE: dict[str, Any] = {"agent__noise": "ornstein_uhlenbeck", "agent__parameter_noise": 0.1}
SEQUENCES: dict[str, Any] = {"network__q__body": "gru", "agent__sequence": 4, "agent__burn_in": 2}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "trpo": ("CartPole-v1", "trpo", MANAGERS["vector"] | {"agent__minibatches": 2}),
    "recurrent trpo": ("CartPole-v1", "trpo", LSTM | {"agent__minibatches": 2}),
    "reinforce": ("CartPole-v1", "reinforce", MANAGERS["vector"]),
    "reinforce, in the middle of an episode": ("Pendulum-v1", "reinforce", LSTM | LONG),
    "ars": ("CartPole-v1", "ars", MANAGERS["vector"]),
    "ars, in the middle of an episode": ("Pendulum-v1", "ars", MANAGERS["alternate"] | LONG),
    "pqn": ("CartPole-v1", "pqn", MANAGERS["vector"] | {"agent__parameter_noise": 0.1}),
    "schedules": (
        "CartPole-v1",
        "ppo",
        {
            "agent__clip": "cosine(0.3, 0.1)",
            "agent__gamma": "linear(0.9, 0.99)",
            "agent__entropy_coef": "linear(0, 0.1, warmup=0.2)",
            "agent__learning_rate": "ReduceLROnPlateau(1e-3, factor=0.5, patience=0)",
            "agent__parameter_noise": "linear(0.1, 0.01)",
        },
    ),
    "schedules of a replay": (
        "Pendulum-v1",
        "sac",
        {
            "agent__critic_learning_rate": "by_return(-9999: 1e-3, -9: 1e-4)",
            "agent__actor_learning_rate": "StepLR(1e-3, 0.2)",
            "agent__updates_per_step": "linear(0.1, 1)",
            "agent__gamma": "linear(0.9, 0.99)",
            "agent__n_step": 2,
            "agent__normalize_reward": True,
            "agent__importance_exponent": "constant(0.7)",
            "agent__prioritized": True,
            "agent__parameter_noise": 0.1,
            "agent__warmup": 50,
            "agent__batch_size": 8,
            "agent__replay": 500,
        },
    ),
    "recurrent pqn": ("CartPole-v1", "pqn", LSTM),
    "maddpg": ("team_worlds:Mixed", "maddpg", TEAM | NOISE | {"agent__policies": 2}),
    "recurrent qmix": ("team_worlds:Chooser", "qmix", TEAM | SEQUENCES | {"agent__parameter_noise": 0.1}),
    "vdn": ("team_worlds:Chooser", "vdn", TEAM | {"agent__prioritized": True}),
    "mappo": ("team_worlds:TwoSteps", "mappo", {"agent__minibatches": 2}),
}

SLOW = ("recurrent trpo", "reinforce", "ars, in the middle of an episode", "recurrent pqn", "vdn", "mappo")
MARKED = [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES]


@pytest.mark.parametrize("case", MARKED)
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(case: str, tmp_path: Path) -> None:
    environment, agent, changes = CASES[case]
    settings = COMMON | changes
    straight = train(tmp_path / "straight", environment, agent, **settings).run
    stopped = train(tmp_path / "stopped", environment, agent, stop_after("step", settings["nb_step"] / 3), **settings)
    assert stopped.reason.startswith("SIG")
    assert 0 < stopped.steps < settings["nb_step"]
    assert_same_run(straight, ludus.resume(stopped.run).run)
