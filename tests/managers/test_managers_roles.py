"""Rows of single agents from environments with several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from team_worlds import Parting, batch_of, make_worker

from ludus.containers.loop import begin, collect
from ludus.core.errors import UserError
from ludus.core.types import Tensors
from ludus.environments.agents_toy import CueTeam
from ludus.environments.config import EnvConfig
from ludus.managers.base import BatchManager
from ludus.managers.make import make_manager
from ludus.managers.roles import AgentRows, RolesManager, agents_of

TOY = "ludus.environments.agents_toy:CueTeam"


def team(num: int = 2, environment: Any = None, **config: Any) -> BatchManager:
    return make_manager(EnvConfig(id=TOY, num=num, **config), environment=environment)


def shared(joint: BatchManager) -> RolesManager:
    return RolesManager(joint, {"agent": AgentRows(joint, agents_of(joint.observation))})


def right(step: Any) -> Tensors:
    """The cues themselves, so every agent is rewarded."""
    return {"action": step.observation["observation"].argmax(1)}


def test_each_agent_is_a_row_with_its_own_rewards_and_endings_and_padding_after_it() -> None:
    manager = shared(team(num=2, options=("agents=2", "length=3")))
    assert list(manager.observation) == ["observation"]
    assert list(manager.action) == ["action"]
    assert manager.roles["agent"].agents == 2
    step = manager.reset(0)
    assert step.first.all()
    assert not step.real.any()
    rows: list[tuple[list[Any], ...]] = []
    for _ in range(5):
        step = manager.step(right(step))
        rows.append(tuple(x.tolist() for x in (step.reward, step.terminated, step.truncated, step.first, step.real)))
    reward, terminated, truncated, first, real = zip(*rows, strict=True)
    assert [x[:2] for x in reward] == [[1, 1], [1, 1], [1, 0], [0, 0], [1, 1]]
    assert [x[:2] for x in terminated] == [[False, False], [False, True], [False, False], [False, False], [False] * 2]
    assert [x[:2] for x in truncated] == [[False] * 2, [False] * 2, [True, False], [False] * 2, [False] * 2]
    assert [x[:2] for x in first] == [[False] * 2, [False] * 2, [False] * 2, [True, True], [False] * 2]
    assert [x[:2] for x in real] == [[True, True], [True, True], [True, False], [False, False], [True, True]]
    assert all(x[:2] == x[2:] for part in (reward, terminated, truncated, first, real) for x in part)  # both worlds
    (episode, _) = manager.episodes()
    assert (episode.reward, episode.length) == (2.5, 3)
    assert episode.infos["return/agent_0"] == 3
    manager.close()


def test_a_limit_of_the_world_truncates_the_agents_that_are_in_it() -> None:
    manager = shared(team(num=1, max_episode_steps=2, options=("agents=2", "length=3")))
    step = manager.step(right(manager.reset(0)))
    step = manager.step(right(step))
    assert step.truncated.tolist() == [True, False]
    assert step.terminated.tolist() == [False, True]


def test_agents_that_end_differently_in_one_step() -> None:
    """One terminates and another is truncated: in the rows of each, and in what PPO learns from them."""
    manager = shared(team(num=1, environment=Parting))
    steps = [manager.reset(0)]
    for _ in range(3):
        steps.append(manager.step({"action": torch.zeros(2, dtype=torch.int64)}))
    flags = [tuple(x.tolist() for x in (step.reward, step.terminated, step.truncated, step.real)) for step in steps[1:]]
    assert flags == [
        ([1, 10], [False] * 2, [False] * 2, [True] * 2),
        ([2, 20], [True, False], [False, True], [True] * 2),
        ([0, 0], [False] * 2, [False] * 2, [False] * 2),  # the reset
    ]
    joint = manager.joint.last_step()
    assert joint.first.all()
    manager.close()
    worker = make_worker("Parting", "ppo", env__num=1, agent__rollout=5, agent__minibatches=1, agent__gamma=0.9)
    begin(worker, 0)
    collect(worker)
    batch = worker.cache.read()
    # steps 2 and 5 end the episodes, and step 3 is the reset, padding; values after a time limit count
    assert batch.real.tolist() == [[True] * 2, [True] * 2, [False] * 2, [True] * 2, [True] * 2]
    discount = [[0.9, 0.9], [0.0, 0.9], [0.9, 0.9], [0.9, 0.9], [0.0, 0.9]]
    torch.testing.assert_close(batch.discount, torch.tensor(discount))
    assert batch.continues.tolist() == [[1, 1], [0, 0], [0, 0], [1, 1], [0, 0]]
    worker.close()


@pytest.mark.parametrize("name", ["maddpg", "vdn"])
def test_agents_that_end_differently_in_one_step_of_a_world(name: str) -> None:
    """In the joint layout: one terminates and another is truncated, and the world is truncated."""
    worker = make_worker("Parting", name, agent__gamma=0.9, agent__batch_size=64)
    agent: Any = worker.agent
    begin(worker, 0)
    batch = agent.prepare(batch_of(worker))
    last = batch.observation["ends/observation"][1] == 2
    assert last.any()
    assert not last.all()
    later = {key: x[1] for key, x in batch.observation.items()}
    assert agent.joint.continues(later).tolist() == [[not x, True] for x in last.tolist()]
    assert agent.joint.terminated(later).tolist() == [[x, False] for x in last.tolist()]
    assert agent.joint.active(later).tolist() == [[not x, not x] for x in last.tolist()]
    assert not batch.terminated.any()
    assert batch.truncated[0].tolist() == last.tolist()
    if name == "maddpg":
        given = batch.experience
        assert given["discount"][0].tolist() == pytest.approx(np.array([[0.9 * (not x), 0.9] for x in last.tolist()]))
        assert given["continues"][0].tolist() == [[not x, True] for x in last.tolist()]
        assert given["reward"][0].tolist() == [[2, 20] if x else [1, 10] for x in last.tolist()]
    else:
        assert batch.discount.tolist() == [pytest.approx([0.9] * 64)]
    worker.close()


def test_an_agent_that_comes_later_begins_its_episode_then() -> None:
    manager = shared(team(num=1, options=("agents=2", "length=4", "late=true")))
    step = manager.reset(0)
    first, real = [step.first.tolist()], [step.real.tolist()]
    for _ in range(3):
        step = manager.step(right(step))
        first.append(step.first.tolist())
        real.append(step.real.tolist())
    assert first == [[True, True], [False, True], [False, False], [False, False]]
    assert real == [[False, False], [True, False], [True, True], [True, True]]


def test_rows_are_the_same_in_other_processes_and_after_a_resume(shared_fork_server: None) -> None:
    options = ("agents=2", "length=3")
    managers = [shared(team(num=4, options=options)), shared(team(num=4, options=options, backend="subproc"))]
    managers.append(shared(team(num=4, options=options, backend="subproc", alternate=True)))
    steps = [manager.reset(7) for manager in managers]
    for _ in range(5):
        for manager, step in zip(managers, steps, strict=True):
            for group in range(len(manager.groups)):
                rows = manager.groups[group]
                manager.send({k: x[rows.start * 2 : rows.stop * 2] for k, x in right(step).items()}, group)
            for group in range(len(manager.groups)):
                manager.recv(group)
        steps = [manager.last_step() for manager in managers]
        for step in steps[1:]:
            assert torch.equal(steps[0].observation["observation"], step.observation["observation"])
            assert all(torch.equal(a, b) for a, b in zip(steps[0][1:6], step[1:6], strict=True))  # type: ignore[arg-type]
    again = shared(team(num=4, options=options))
    again.load_state_dict(managers[0].state_dict())
    assert again.restored == "exactly"
    a, b = again.step(right(steps[0])), managers[0].step(right(steps[0]))
    assert torch.equal(a.observation["observation"], b.observation["observation"])
    assert torch.equal(a.real, b.real)
    for manager in (*managers, again):
        manager.close()


def test_two_roles_have_rows_of_their_own() -> None:
    joint = team(num=3, options=("agents=2", "guides=1", "length=4"))
    parts = {
        "agent": AgentRows(joint, ["agent_0", "agent_1"], "agent"),
        "guide": AgentRows(joint, ["guide_0"], "guide"),
    }
    manager = RolesManager(joint, parts)
    steps = manager.reset_roles(1)
    assert {role: step.observation["observation"].shape for role, step in steps.items()} == {
        "agent": (6, 3),
        "guide": (3, 6),
    }
    cue = steps["guide"].observation["observation"]
    assert torch.equal(cue[:, 3:], steps["agent"].observation["observation"][::2])  # that of agent_0 of its world
    actions = {"agent": right(steps["agent"]), "guide": {"action": cue[:, :3].argmax(1)}}
    manager.send_roles(actions)
    steps = manager.recv_roles()
    assert all(step.reward.eq(1).all() for step in steps.values())


def test_the_state_of_the_world_is_seen_by_all_its_agents() -> None:
    manager = shared(team(num=2, global_state=True, options=("agents=2", "length=3")))
    step = manager.reset(0)
    assert step.observation["state"].shape == (4, 6)
    assert torch.equal(step.observation["state"][0], step.observation["state"][1])
    assert torch.equal(step.observation["state"][0], step.observation["observation"][:2].flatten())


def test_agents_that_differ_cannot_share_a_policy() -> None:
    joint = team(options=("agents=1", "guides=1"))
    with pytest.raises(
        UserError,
        match=r'agents agent_0 and guide_0 share a policy, but the observation "observation" of agent_0 is continuous '
        r"of shape \(3,\) from 0.0 to 1.0, and that of guide_0 is continuous of shape \(6,\) .*--roles each",
    ):
        shared(joint)

    class Choices(CueTeam):
        def action_space(self, agent: str) -> spaces.Discrete:
            return spaces.Discrete(3 + int(agent[-1]))

    with pytest.raises(UserError, match=r"is categorical of shape \(\) with 3 choices, and that of agent_1 is .* 4"):
        shared(team(environment=Choices))
