"""Teams learn what agents that learn alone do not, and how to talk to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from learning_tasks import UNWATCHED, evaluations

import ludus

WORLDS = "team_worlds:"
QUICK: dict[str, Any] = UNWATCHED | {
    "env.num": 8,
    "network.hidden": (32,),
    "agent.batch_size": 64,
    "agent.warmup": 200,
    "agent.learning_rate": 5e-3,
}
RANDOM: dict[str, Any] = {"agent.epsilon_schedule": "constant", "agent.epsilon_start": 1.0, "agent.target_every": 20}


def score(runs: Path, world: str, agent: str, nb_step: int, settings: dict[str, Any], seed: int = 0) -> float:
    """Train, and return the mean return of 100 greedy episodes at the end."""
    own: dict[str, Any] = QUICK | {"runs": str(runs)} | settings
    result = ludus.train(WORLDS + world, agent, nb_step=nb_step, seed=seed, settings=own)
    return evaluations(result.run)[-1][1]


@pytest.mark.parametrize(
    ("world", "agent", "expected"),
    [
        ("TwoSteps", "qmix", 0.8),
        pytest.param("TwoSteps", "vdn", 0.7, marks=pytest.mark.slow),  # the payoff is no sum
        ("AdditiveTwoSteps", "vdn", 0.8),
        ("AdditiveTwoSteps", "dqn", 0.7),  # the other's random choices make 0.6 of 0.8
    ],
)
def test_a_team_finds_what_each_alone_does_not(world: str, agent: str, expected: float, tmp_path: Path) -> None:
    """All actions are random while training, so that everybody sees the same games (Rashid et al. 2018, §5)."""
    assert score(tmp_path, world, agent, 3_000, RANDOM) == pytest.approx(expected)


SPEECH: dict[str, dict[str, Any]] = {
    "maddpg": {
        "agent.updates_per_step": 0.25,
        "agent.tau": 0.05,
        "agent.output_coef": 0.02,
        "agent.max_grad_norm": 0.0,
    },
    "vdn": {"agent.learning_rate": 2e-3, "agent.target_every": 50, "agent.epsilon_share": 0.7},
}


@pytest.mark.parametrize("agent", SPEECH)
def test_a_speaker_and_a_listener_agree_on_words(agent: str, tmp_path: Path) -> None:
    """They see and do different things; without the word, one of three episodes is paid."""
    assert score(tmp_path, "Speech", agent, 5_000, {"agent.gamma": 0.9} | SPEECH[agent]) >= 0.95


@pytest.mark.slow
def test_two_who_move_meet(tmp_path: Path) -> None:
    """Box actions; at random they are paid about −6."""
    settings = {"agent.updates_per_step": 0.25, "agent.gamma": 0.9}
    assert score(tmp_path, "Meeting", "maddpg", 8_000, settings) >= -1.0


MAPPO: dict[str, Any] = {
    "env.num": 16,
    "agent.rollout": 50,
    "agent.learning_rate": 1e-3,
    "agent.gamma": 0.95,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "agent", "nb_step", "settings", "target"),
    [
        ("simple_speaker_listener_v4", "maddpg", 40_000, {}, -25.0),  # untrained −58; seed 0: −16
        ("simple_spread_v3", "maddpg", 100_000, {"agent.warmup": 5_000}, -20.0),  # untrained −26; seed 0: −17
        ("simple_spread_v3", "mappo", 80_000, MAPPO, -21.0),  # seed 0: −18.8
        ("simple_spread_v3", "qmix", 40_000, {"agent.gamma": 0.95}, -23.0),  # seed 0: −20.7
    ],
)
def test_particles_learn_to_work_together(
    world: str, agent: str, nb_step: int, settings: dict[str, Any], target: float, tmp_path: Path
) -> None:
    """Mean returns of agents in mpe2's worlds, within two minutes each."""
    pytest.importorskip("mpe2")
    own = UNWATCHED | {"runs": str(tmp_path), "env.num": 8} | settings
    result = ludus.train(f"mpe2.{world}:parallel_env", agent, nb_step=nb_step, settings=own)
    assert evaluations(result.run)[-1][1] >= target
