"""Agents that learn from whole worlds: loaded policies, evaluation, ranks and IMPALA's workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from containers_setup import train
from team_worlds import Mixed, Speech

QUICK: dict[str, Any] = {"agent__warmup": 50, "agent__batch_size": 16, "nb_step": 120}


def test_a_loaded_policy_acts_for_all_agents(tmp_path: Path) -> None:
    """Mixed asserts what it is sent."""
    result = train(tmp_path, "team_worlds:Mixed", "maddpg", agent__policies=2, **QUICK)
    policy, world = result.load("latest"), Mixed()
    observations, _ = world.reset(seed=0)
    for step in range(6):
        actions = policy.act(observations, first=step == 0)
        observations, *_ = world.step({agent: actions[agent] for agent in world.agents})
    assert policy.evaluate(4).mean == pytest.approx(np.mean([21 + 0, 2 + 3 + 4, 3 + 4 + 5 + 5 + 6 + 7]))


def test_a_loaded_policy_values_a_world(tmp_path: Path) -> None:
    policy, world = train(tmp_path, "team_worlds:Speech", "qmix", **QUICK).load("latest"), Speech()
    observations, _ = world.reset(seed=3)
    assert set(policy.act(observations)) == {"speaker", "listener"}
    assert np.isfinite(policy.value(observations))


@pytest.mark.slow
@pytest.mark.parametrize(
    "container", [{"container": "distrib", "distrib__ranks": 2}, {"container": "impala", "impala__workers": 2}]
)
@pytest.mark.parametrize("agent", ["maddpg", "qmix"])
def test_other_containers(agent: str, container: dict[str, Any], tmp_path: Path) -> None:
    result = train(tmp_path, "team_worlds:Chooser", agent, agent__parameter_noise=0.1, **QUICK, **container)
    assert result.steps >= 120
