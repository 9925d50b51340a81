"""Imitation with every kind of observation and action: it learns, is played and recorded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix_parts import ACTIONS, NETWORKS, OBSERVATIONS, common, environment_of

import ludus
from ludus.data.npz import save_npz
from ludus.runs.record import record_episodes

ROLLOUT: dict[str, Any] = {"agent.rollout": 6, "agent.minibatches": 1, "nb_step": 19}
OWN: dict[str, dict[str, Any]] = {
    "bc": {"agent.batch_size": 8, "nb_step": 2},
    "dagger": {"agent.batch_size": 8, "agent.rollout": 6, "agent.updates": 2, "nb_step": 19},
    "gail": ROLLOUT | {"agent.discriminator_batch": 8, "agent.discriminator_updates": 2},
}
OWN["gail_trpo"] = OWN["gail"]
FAST = [  # every agent and every kind of observation
    ("vector", "mixed masked", "bc"),
    ("tuple", "beta", "bc"),
    ("nested dict", "mixed masked", "gail"),
    ("image HWC", "tanh", "gail"),
    ("multidiscrete", "multidiscrete masked", "gail_trpo"),
    ("tuple", "multibinary", "dagger"),
]
REST = [(o, a, agent) for o in OBSERVATIONS for a in ACTIONS for agent in OWN if (o, a, agent) not in FAST]
SEQUENCES: dict[str, Any] = {"agent.sequence": 4, "agent.burn_in": 2}
RECURRENT = [  # every recurrent network with both agents
    ("vector", "mixed masked", "bc", "lstm body"),
    ("nested dict", "multidiscrete masked", "bc", "lstm source and body"),
    ("tuple", "beta", "bc", "own network"),
    ("nested dict", "mixed masked", "dagger", "lstm body"),
    ("vector", "tanh", "dagger", "lstm source and body"),
    ("multidiscrete", "discrete masked", "dagger", "own network"),
]
REST_RECURRENT = [
    (o, a, agent, network)
    for o in OBSERVATIONS
    for a in ACTIONS
    for agent in ("bc", "dagger")
    for network in ("lstm body", "own network")
    if (o, a, agent, network) not in RECURRENT
]


@pytest.mark.parametrize(
    ("observation", "action", "agent"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_what_a_random_policy_did_is_imitated(observation: str, action: str, agent: str, tmp_path: Path) -> None:
    imitate(observation, action, agent, {}, tmp_path)


@pytest.mark.parametrize(
    ("observation", "action", "agent", "network"),
    [*RECURRENT, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST_RECURRENT)],
)
def test_recurrent_networks_imitate(observation: str, action: str, agent: str, network: str, tmp_path: Path) -> None:
    imitate(observation, action, agent, NETWORKS[network] | SEQUENCES, tmp_path)


def imitate(observation: str, action: str, agent: str, changes: dict[str, Any], tmp_path: Path) -> None:
    environment, settings = environment_of("simple"), common(observation, action, "simple", tmp_path)
    if action in ("tanh", "beta"):
        settings["agent.distribution"] = action
    random = ludus.train(environment, "ppo", preset="none", settings=settings | ROLLOUT)
    given = {"agent.teacher": str(random.run)}
    if agent != "dagger":
        save_npz(tmp_path / "x.npz", record_episodes(random.load("latest"), 4, greedy=False))
        given = {"data": str(tmp_path / "x.npz")}
    result = ludus.train(environment, agent, preset="none", settings=settings | OWN[agent] | given | changes)
    assert result.evaluation is not None
    assert len(result.evaluation.returns) == 2
    assert len(record_episodes(result.load("latest"), 2)) == 2  # the environment itself refuses a wrong action
