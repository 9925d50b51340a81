"""VDN and QMIX: losses by hand, masks, agents that leave, recurrent networks, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from team_worlds import batch_of, make_worker

from ludus.containers.loop import begin, collect, improve
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.environments.multiagent import ENTERED

STATE: dict[str, Any] = {"env__global_state": True}
SEQUENCES: dict[str, Any] = {"network__q__body": "gru", "agent__sequence": 4, "agent__burn_in": 2, "agent__overlap": 2}


def own_options(agent: str) -> dict[str, Any]:
    return STATE if agent == "qmix" else {}


def spread_targets(agent: Any) -> None:
    """Make the target networks differ from what they follow."""
    for p in agent.target.parameters():
        p.data.add_(0.3 * torch.randn(p.shape, generator=agent.generator))


def values(agent: Any, network: Any, batch: Any, time: int, row: int) -> list[Any]:
    """The values of each agent's choices, from single observations and the agent's number."""
    found = []
    for i, (name, features) in enumerate((("masked/place", 3), ("leaver/observation", 2))):
        seen = batch.observation[name][time, row]
        own = torch.eye(2)[int(seen)] if name == "leaver/observation" else seen
        padded = torch.cat([own, torch.zeros(3 - features), torch.eye(2)[i]])
        first = torch.zeros(1, 1, dtype=torch.bool)
        found.append(network({"own": padded[None, None]}, agent.initial_state(1).select("q"), first)[0]["q"][0, 0])
    return found


def mixed(agent: Any, networks: Any, q: Any, batch: Any, time: int, row: int) -> float:
    """The team's value, by the sum or by the equation of the mixing network."""
    if "mixer" not in networks:
        return float(sum(q))
    state = batch.observation["state"][time, row][None, None]
    outputs, _ = networks["mixer"]({"state": state}, {}, torch.zeros(1, 1, dtype=torch.bool))
    weight, bias, last, bottom = (x[0, 0].detach().numpy() for x in outputs.values())
    hidden = np.asarray(q) @ np.abs(weight.reshape(2, -1)) + bias
    return float(np.where(hidden > 0, hidden, np.expm1(hidden)) @ np.abs(last) + bottom[0])


@pytest.mark.parametrize("name", ["vdn", "qmix"])
def test_the_loss_is_that_by_hand(name: str) -> None:
    """Double Q targets with masks; who has left adds nothing, and who was cut off could have gone on."""
    more: dict[str, Any] = {"agent__batch_size": 64, "agent__warmup": 100} | own_options(name)
    worker = make_worker("Chooser", name, agent__gamma=0.9, env__num=8, **more)
    agent: Any = worker.agent
    begin(worker, 0)
    batch = agent.prepare(batch_of(worker))
    spread_targets(agent)
    squares, seen = [], set()
    with torch.no_grad():
        for row in range(batch.reward.shape[1]):
            t = int(batch.observation["reward/masked"][1, row])  # of the step
            seen.add(t)
            now, best, old = (
                values(agent, networks["q"], batch, time, row)
                for networks, time in ((agent.networks, 0), (agent.networks, 1), (agent.target.networks, 1))
            )
            there, stays = (1.0, float(t <= 3)), (1.0, float(t < 3))
            taken = [
                float(q[int(batch.action[who][0, row])]) * x
                for q, who, x in zip(now, ("masked", "leaver"), there, strict=True)
            ]
            allowed = [batch.observation["action_mask/masked"][1, row].bool(), torch.ones(2, dtype=torch.bool)]
            later = [
                float(v[int(b[: len(m)].masked_fill(~m, -np.inf).argmax())]) * x
                for v, b, m, x in zip(old, best, allowed, stays, strict=True)
            ]
            target = float(batch.reward[0, row]) + 0.9 * mixed(agent, agent.target.networks, later, batch, 1, row)
            squares.append((target - mixed(agent, agent.networks, taken, batch, 0, row)) ** 2)
    assert {1, 3, 4, 6} <= seen
    losses, _ = agent.compute_loss(batch)
    assert float(losses["value"].detach()) == pytest.approx(np.mean(squares), rel=1e-4)
    worker.close()


def test_each_agent_explores_by_itself() -> None:
    worker = make_worker("TwoSteps", "vdn", agent__epsilon_schedule="constant", agent__epsilon_start=0.5, env__num=64)
    agent: Any = worker.agent
    begin(worker, 0)
    step, state = worker.seat.env_step, worker.seat.hidden_state
    noise = agent.make_noise(Rows.all(64), torch.Generator().manual_seed(0)).next()
    greedy, explored = agent.act(step, state).action, agent.act(step, state, noise).action
    changed = torch.stack([greedy[name] != explored[name] for name in greedy], 1)
    assert {tuple(x) for x in changed.tolist()} == {(False, False), (False, True), (True, False), (True, True)}
    assert (changed <= (noise["explore"] < 0.5)).all()
    worker.close()


@pytest.mark.parametrize("name", ["vdn", "qmix"])
def test_recurrent_networks_learn_from_sequences_and_see_what_acting_saw(name: str) -> None:
    worker = make_worker("Chooser", name, **SEQUENCES, **own_options(name), agent__replay=4_000)
    agent: Any = worker.agent
    assert agent.recurrent
    begin(worker, 0)
    batch = batch_of(worker)
    assert next(iter(batch.state.values())).shape == (16, 2, 8)
    prepared = agent.prepare(batch)
    # the same steps one by one, from the state that acting had
    inputs, state, steps = agent.inputs(batch.observation), batch.state, []
    for t in range(len(batch.first)):
        q, state = agent.q({k: x[t : t + 1] for k, x in inputs.items()}, state, batch.first[t : t + 1])
        steps.append(q)
    whole, _ = agent.q(agent.inputs(prepared.observation), prepared.state, prepared.first)
    torch.testing.assert_close(whole, torch.cat(steps)[2:], rtol=1e-4, atol=1e-5)
    for _ in range(20):
        collect(worker)
        improve(worker)
    assert agent.updates > 3
    worker.close()


@pytest.mark.parametrize("name", ["vdn", "qmix"])
def test_who_comes_back_remembers_nothing(name: str) -> None:
    """Where an agent enters in the middle of an episode, its hidden state begins anew: in acting and in learning."""
    worker = make_worker("Chooser", name, **SEQUENCES, **own_options(name), agent__replay=4_000)
    agent: Any = worker.agent
    begin(worker, 0)
    batch = batch_of(worker)
    batch.first[:] = False
    inputs = agent.inputs(batch.observation)
    kept, _ = agent.q(inputs, batch.state, batch.first)
    steps, back = len(batch.first), 4  # after the burn-in of 2
    batch.observation["status/leaver"][back] = ENTERED
    columns = batch.reward.shape[1]
    # by hand: one agent after the other, from zeros where the leaver comes back
    network, zero = agent.networks["q"], agent.initial_state(1).select("q").rows(slice(0, 1)).map(lambda x: x[:, 0])
    no, expected = torch.zeros(1, 1, dtype=torch.bool), torch.zeros_like(kept)
    for row in range(columns):
        for i in range(2):
            state = batch.state.select("q").map(lambda x, row=row, i=i: x[row : row + 1, i])  # type: ignore[misc]
            for t in range(steps):
                state = zero if (i, t) == (1, back) else state
                outputs, state = network({"own": inputs["own"][t : t + 1, row : row + 1, i]}, state, no)
                expected[t, row, i] = outputs["q"][0, 0]
    inputs = agent.inputs(batch.observation)
    q, _ = agent.q(inputs, batch.state, batch.first)
    torch.testing.assert_close(q, expected, rtol=1e-4, atol=1e-5)
    assert q[:, :, 0].equal(kept[:, :, 0])
    assert not q[back:, :, 1].allclose(kept[back:, :, 1])
    prepared = agent.prepare(batch)
    learned, _ = agent.q(agent.inputs(prepared.observation), prepared.state, prepared.first)
    torch.testing.assert_close(learned, q[2:], rtol=1e-4, atol=1e-5)
    state = batch.state
    for t in range(steps):
        seen = {name: x[t] for name, x in batch.observation.items()}
        step = worker.seat.env_step.rows(torch.zeros(columns, dtype=torch.int64))
        step = step._replace(observation=seen, first=batch.first[t])
        acted = agent.act(step, state)
        state = acted.state
        best = expected[t, :, 1, :2].argmax(-1)
        assert acted.action["leaver"].equal(best)
    worker.close()


@pytest.mark.parametrize("name", ["vdn", "qmix"])
def test_masks_ends_values_and_priorities(name: str) -> None:
    """Chooser asserts what it is sent."""
    worker = make_worker("Chooser", name, agent__n_step=3, agent__prioritized=True, **own_options(name))
    agent: Any = worker.agent
    begin(worker, 0)
    for _ in range(30):
        collect(worker)
        improve(worker)
    batch = worker.cache.read()
    assert agent.updates > 5
    assert agent.td_errors(batch).shape == (16,)
    assert agent.value(worker.seat.env_step, worker.seat.hidden_state).shape == (4,)
    losses, _ = agent.compute_loss(agent.prepare(batch))
    left = batch.observation["status/leaver"][0] != 0
    assert left.any()
    batch.action["leaver"][0, left] ^= 1  # what is sent for an agent that has left does not matter
    torch.testing.assert_close(agent.compute_loss(agent.prepare(replace(batch)))[0], losses)
    worker.close()


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        ("Meeting", {}, r"vdn takes a Discrete action of each agent, but left has continuous .*; use ippo or mappo"),
        ("TwoSteps", {"network__q__body": "gru"}, "A recurrent network learns from sequences: set agent.sequence"),
        ("TwoSteps", {"agent__epsilon_end": 2.0}, "agent.epsilon_end is 2"),
        ("Pictures", {}, r'vdn takes vectors, but the observation "agent_0/observation" has shape .*; flatten it with'),
    ],
)
def test_what_is_refused(world: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_worker(world, "vdn", **changes)
