"""Agents that learn from whole worlds: loaded policies, evaluation, ranks and IMPALA's workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from containers_setup import train
from team_worlds import Mixed, Speech
from torch import nn

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState

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


def test_a_loaded_policy_values_a_world_by_the_state_that_training_saw(tmp_path: Path) -> None:
    """Speech has no state of its own: it is made of all observations."""
    policy, world = train(tmp_path, "team_worlds:Speech", "qmix", **QUICK).load("latest"), Speech()
    observations, _ = world.reset(seed=3)
    assert set(policy.act(observations)) == {"speaker", "listener"}
    goal, heard = torch.eye(3)[observations["speaker"]], torch.from_numpy(observations["listener"])
    agent: Any = policy.agent
    expected = value_by_hand(agent, [torch.cat([goal, torch.zeros(1)]), heard], [3, 5], torch.cat([goal, heard]))
    assert policy.value(observations) == pytest.approx(expected, rel=1e-5)
    given = {**observations, "state": np.zeros(7, np.float32)}
    assert policy.value(given) != pytest.approx(expected, rel=1e-5)


def value_by_hand(agent: Any, own: list[Any], choices: list[int], state: Any) -> float:
    """QMIX: the mixing network's value of each agent's best choice."""
    first, best = torch.zeros(1, 1, dtype=torch.bool), []
    with torch.no_grad():
        for i, (seen, n) in enumerate(zip(own, choices, strict=True)):
            q, _ = agent.networks["q"]({"own": torch.cat([seen, torch.eye(2)[i]])[None, None]}, HiddenState(), first)
            best.append(q["q"][0, 0, :n].max())
        given, _ = agent.networks["mixer"]({"state": state[None, None]}, HiddenState(), first)
        weight, bias, last, bottom = (given[name][0, 0] for name in ("weight", "bias", "last_weight", "last_bias"))
        hidden = nn.functional.elu(torch.stack(best) @ weight.view(2, -1).abs() + bias)
        return float(hidden @ last.abs() + bottom)


def test_a_state_that_only_the_environment_knows_is_asked_for_where_it_is_seen(tmp_path: Path) -> None:
    """TwoSteps has a state of its own; the actors of QMIX and MAPPO do not see it."""
    observations = {"first": 0, "second": 0}
    whole = {**observations, "state": np.eye(3, dtype=np.float32)[0]}
    asked = r"give it in every call, beside the agents, as in policy.value\(\{\*\*observations, \"state\""
    policy = train(tmp_path, "team_worlds:TwoSteps", "qmix", **QUICK).load("latest")
    assert policy.act(observations) == policy.act(whole)
    with pytest.raises(UserError, match=asked):
        policy.value(observations)
    own = [torch.eye(3)[0]] * 2
    assert policy.value(whole) == pytest.approx(value_by_hand(policy.agent, own, [2, 2], torch.eye(3)[0]), rel=1e-5)

    policy = train(tmp_path, "team_worlds:TwoSteps", "mappo").load("latest")
    assert policy.act(observations) == policy.act(whole)
    np.testing.assert_array_equal(*(policy.distribution(x)["first"]["probabilities"] for x in (observations, whole)))
    with pytest.raises(UserError, match=asked):
        policy.value(observations)
    assert policy.value(whole).keys() == {"first", "second"}

    policy = train(tmp_path, "team_worlds:TwoSteps", "ppo", env__global_state=True).load("latest")
    assert set(policy.act(whole)) == {"first", "second"}
    for call in (policy.act, policy.distribution):
        with pytest.raises(UserError, match=asked):
            call(observations)
    assert set(policy.act(whole)) == {"first", "second"}


def test_a_recurrent_critic_must_have_seen_every_state(tmp_path: Path) -> None:
    policy = train(tmp_path, "team_worlds:TwoSteps", "mappo", network__body="lstm").load("latest")
    whole = {"first": 0, "second": 0, "state": np.eye(3, dtype=np.float32)[0]}
    policy.act(whole)
    second, remembered = {**whole, "state": np.eye(3, dtype=np.float32)[1]}, policy.state
    expected = policy.value(second)
    policy.reset()
    policy.act({"first": 0, "second": 0})  # without it, the actor remembers the same
    for name, x in remembered.items():
        assert name.startswith("agent/critic") or (policy.state[name] == x).all()
    with pytest.raises(UserError, match="give it in every call"):
        policy.value(second)
    policy.act(whole, first=True)
    assert policy.value(second) == expected


def test_maddpg_values_who_has_left_at_nothing(tmp_path: Path) -> None:
    policy, world = train(tmp_path, "team_worlds:Mixed", "maddpg", **QUICK).load("latest"), Mixed()
    observations, _ = world.reset(seed=0)
    del observations["leaver"]
    networks: Any = policy.agent.networks
    first, own = torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, 1, 3, 5)
    own[..., 0, :3] = place = torch.from_numpy(observations["masked"]["place"])
    own[..., 1, 0] = 1  # a blank observation: the first of two choices
    own[..., 2, :] = numbers = torch.from_numpy(observations["mover"])
    with torch.no_grad():
        output = networks["actor"]({"own": own}, HiddenState(), first)[0]["policy"][0, 0]
        taken = torch.zeros(3, 4)
        taken[0, output[0].argmax()] = 1
        taken[2, :3] = output[2, :3].tanh()
        seen = {"masked/place": place, "leaver/observation": torch.eye(2)[0], "mover/observation": numbers}
        given = {name: x[None, None] for name, x in {**seen, "taken_action": taken.flatten()}.items()}
        q = networks["critic"](given, HiddenState(), first)[0]["value"].flatten()
    assert policy.value(observations) == pytest.approx(float(q[0] + q[2]) / 3, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "container", [{"container": "distrib", "distrib__ranks": 2}, {"container": "impala", "impala__workers": 2}]
)
@pytest.mark.parametrize("agent", ["maddpg", "qmix"])
def test_other_containers(agent: str, container: dict[str, Any], tmp_path: Path) -> None:
    result = train(tmp_path, "team_worlds:Chooser", agent, agent__parameter_noise=0.1, **QUICK, **container)
    assert result.steps >= 120
