"""MAPPO and IPPO: who sees the state, rows of agents, and the same numbers as PPO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from team_worlds import make_worker

from ludus.containers.loop import begin, collect, improve
from ludus.core.errors import UserError

ROLLOUT: dict[str, Any] = {"agent__rollout": 16, "agent__minibatches": 2}


def test_the_critic_alone_sees_the_state() -> None:
    worker = make_worker("TwoSteps", "mappo", env__num=4, **ROLLOUT)
    agent: Any = worker.agent
    assert list(agent.networks["actor"].inputs) == ["observation"]
    assert list(agent.networks["critic"].inputs) == ["observation", "state"]
    begin(worker, 0)
    collect(worker)
    batch = worker.cache.read()
    assert batch.reward.shape == (16, 8)  # worlds × agents
    state = batch.observation["state"].unflatten(1, (4, 2))
    assert state[:, :, 0].equal(state[:, :, 1])
    assert (batch.reward.unflatten(1, (4, 2)).diff(dim=2) == 0).all()
    improve(worker)
    worker.close()


def test_ippo_is_ppo() -> None:
    parameters = []
    for name in ("ippo", "ppo"):
        worker = make_worker("TwoSteps", name, **ROLLOUT)
        begin(worker, 0)
        collect(worker)
        improve(worker)
        parameters.append(dict(worker.agent.named_parameters()))
        worker.close()
    torch.testing.assert_close(parameters[0], parameters[1], rtol=0, atol=0)
    assert not any("state" in name for name in parameters[0])


@pytest.mark.parametrize("name", ["maddpg", "vdn", "qmix"])
def test_a_single_agent_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is for environments with several agents, but this one has a single"):
        make_worker("Pictures", name, env__options=("agents=1",))
