"""MADDPG: gradients by hand, masks, agents that leave, ensembles of policies, different agents, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from team_worlds import batch_of, make_worker

from ludus.agents.maddpg import CHOSEN
from ludus.containers.loop import begin, collect, improve
from ludus.core.errors import UserError
from ludus.core.rows import Rows

Array = Any


def one_hot(choice: int, size: int) -> Array:
    return np.eye(size)[choice]


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return e / e.sum()


class Layers:
    """One member of a batched MLP with one hidden layer of tanh, in numpy: outputs, and gradients by hand."""

    def __init__(self, network: Any, output: str, member: int) -> None:
        layers = (network.layers[0], network.projections[output])
        self.w1, self.b1, self.w2, self.b2 = (
            x[member].detach().numpy() for layer in layers for x in (layer.weight, layer.bias)
        )

    def __call__(self, x: Array) -> Array:
        return (np.tanh(x @ self.w1 + self.b1[0]) @ self.w2 + self.b2[0]).copy()

    def backward(self, x: Array, slope: Array) -> tuple[list[Array], Array]:
        """Gradients of w1, b1, w2, b2, and of the input, given that of the output."""
        hidden = np.tanh(x @ self.w1 + self.b1[0])
        inner = (1 - hidden**2) * (self.w2 @ slope)
        return [np.outer(x, inner), inner[None], np.outer(hidden, slope), slope[None]], self.w1 @ inner


def as_double(batch: Any) -> Any:
    parts = {"observation": batch.observation, "experience": batch.experience}
    changed = {
        kind: {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
        for kind, tensors in parts.items()
    }
    return replace(batch, **changed)


@pytest.fixture
def two_agents(request: Any) -> Any:
    """Speaker and listener in float64, whose targets differ from what they follow, and a prepared batch."""
    settings = {"network__activation": "tanh", "agent__gamma": 0.9, "agent__temperature": 0.7}
    worker = make_worker("Speech", "maddpg", **settings, agent__cooperative=getattr(request, "param", False))
    agent: Any = worker.agent
    begin(worker, 0)
    batch = batch_of(worker)
    agent.double()
    for p in agent.parameters():
        p.data.add_(0.3 * torch.randn(p.shape, generator=agent.generator, dtype=torch.float64))
    yield agent, as_double(agent.prepare(batch))
    worker.close()


def rows_of(batch: Any, time: int) -> Any:
    """The observations of each row: of the speaker [3], of the listener [4], and of both."""
    for row in range(batch.reward.shape[1]):
        goal = one_hot(int(batch.observation["speaker/observation"][time, row]), 3)
        heard = batch.observation["listener/observation"][time, row].numpy()
        yield [np.append(goal, 0.0), heard], np.concatenate([goal, heard])


def test_the_critics_gradient_is_that_by_hand(two_agents: Any) -> None:
    """Σ_i mean (r_i + γ(1 − d)Q'_i(x', μ'(o')) − Q_i(x, a))², and its gradient for both critics."""
    agent, batch = two_agents
    actors = [Layers(agent.target.networks["actor"], "policy", i) for i in range(2)]
    old, new = ([Layers(n["critic"], "value", i) for i in range(2)] for n in (agent.target.networks, agent.networks))
    later, now, size = list(rows_of(batch, 1)), list(rows_of(batch, 0)), batch.reward.shape[1]
    loss, gradients = 0.0, [[np.zeros_like(x) for x in (q.w1, q.b1, q.w2, q.b2)] for q in new]
    for row in range(size):
        drawn = batch.experience["target_gumbel"][0, row].numpy()
        choices = [int((actors[i](later[row][0][i])[:n] + drawn[i, :n]).argmax()) for i, n in enumerate((3, 5))]
        over = bool(batch.terminated[0, row])
        follows = np.concatenate([later[row][1], *(one_hot(c, 5) * (not over) for c in choices)])
        taken = [int(batch.action[name][0, row]) for name in ("speaker", "listener")]
        x = np.concatenate([now[row][1], *(one_hot(c, 5) for c in taken)])
        for i in range(2):
            target = float(batch.reward[0, row]) + (0.0 if over else 0.9 * float(old[i](follows)[0]))
            error = target - float(new[i](x)[0])
            loss += error**2 / size
            found, _ = new[i].backward(x, np.array([-2 * error / size]))
            gradients[i] = [a + b for a, b in zip(gradients[i], found, strict=True)]
    assert 0 < int(batch.terminated.sum()) < size
    losses, _ = agent.critic_loss(batch)
    assert float(losses["critic"].detach()) == pytest.approx(loss, rel=1e-6)
    critic = agent.networks["critic"]
    layers = (critic.layers[0], critic.projections["value"])
    parameters = [x for layer in layers for x in (layer.weight, layer.bias)]
    for ours, theirs in zip(
        torch.autograd.grad(losses["critic"], parameters), zip(*gradients, strict=True), strict=True
    ):
        np.testing.assert_allclose(ours.numpy(), np.stack(theirs), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("two_agents", "cooperative"), [(False, False), (True, True)], indirect=["two_agents"])
def test_the_actors_gradient_is_that_by_hand(two_agents: Any, cooperative: bool) -> None:
    """−∇Q_i(x, a) with the own action replaced, through the soft choice of the Gumbel-softmax at τ = 0.7.

    If cooperative, −∇Σ_i Q_i(x, a) with the actions of all replaced.
    """
    agent, batch = two_agents
    actors = [Layers(agent.networks["actor"], "policy", i) for i in range(2)]
    critics = [Layers(agent.networks["critic"], "value", i) for i in range(2)]
    size, loss = batch.reward.shape[1], 0.0
    gradients = [[np.zeros_like(x) for x in (a.w1, a.b1, a.w2, a.b2)] for a in actors]
    for row, (own, everything) in enumerate(rows_of(batch, 0)):
        taken = [one_hot(int(batch.action[name][0, row]), 5) for name in ("speaker", "listener")]
        drawn = batch.experience["gumbel"][0, row].numpy()
        soft = [softmax((actors[i](own[i])[:n] + drawn[i, :n]) / 0.7) for i, n in enumerate((3, 5))]
        for i in range(2):
            replaced = [j for j in range(2) if cooperative or j == i]
            actions = [one_hot(int(soft[j].argmax()), 5) if j in replaced else taken[j] for j in range(2)]
            x = np.concatenate([everything, *actions])
            loss -= float(critics[i](x)[0]) / size
            _, slopes = critics[i].backward(x, np.array([-1 / size]))
            for j in replaced:
                slope = slopes[len(everything) + 5 * j :][: len(soft[j])]
                through = np.zeros(5)
                through[: len(soft[j])] = soft[j] * (slope - soft[j] @ slope) / 0.7
                found, _ = actors[j].backward(own[j], through)
                gradients[j] = [a + b for a, b in zip(gradients[j], found, strict=True)]
    losses, _ = agent.actor_loss(batch)
    assert float(losses["actor"].detach()) == pytest.approx(loss, rel=1e-6)
    actor = agent.networks["actor"]
    layers = (actor.layers[0], actor.projections["policy"])
    parameters = [x for layer in layers for x in (layer.weight, layer.bias)]
    for ours, theirs in zip(
        torch.autograd.grad(losses["actor"], parameters), zip(*gradients, strict=True), strict=True
    ):
        np.testing.assert_allclose(ours.numpy(), np.stack(theirs), rtol=1e-5, atol=1e-8)


def test_agents_with_their_own_rewards_endings_and_masks() -> None:
    """Mixed asserts what it is sent; here: shares, discounts and the actions of agents that have left."""
    worker = make_worker("Mixed", "maddpg", env__num=8, agent__batch_size=64, agent__warmup=100)
    agent: Any = worker.agent
    begin(worker, 0)
    batch = batch_of(worker)
    prepared = agent.prepare(batch)
    time = batch.observation["reward/masked"][1].long()  # after the transition; the first agent is paid t
    names = ["masked", "leaver", "mover"]
    given = prepared.experience
    for row, t in enumerate(time.tolist()):
        present = [1.0, float(t <= 3), 1.0]
        paid = [t, t + 1 if t <= 3 else 0, t + 2 if t <= 3 else t + 1]
        assert given["reward"][0, row].tolist() == paid
        assert (given["share"][0, row] > 0).tolist() == [x > 0 for x in present]
        # the leaver terminates at 3; at 6 the others reach a time limit, after which values count
        assert given["discount"][0, row].tolist() == pytest.approx([0.95, 0.0 if t == 3 else 0.95, 0.95])
        assert given["continues"][0, row].tolist() == [1, float(t < 3), 1]
        vectors = given["actions"][0, row]
        assert vectors[0].argmax() == batch.action["masked"][0, row]
        assert vectors[1].sum() == present[1]
        assert vectors[2].tolist() == [*batch.action["mover"][0, row].tolist(), 0.0]
    assert {1, 3, 4, 6} <= set(time.tolist())
    torch.testing.assert_close(given["share"].sum((0, 1)), torch.ones(3))
    losses, _ = agent.critic_loss(prepared)
    spoiled = {name: x.clone() for name, x in given.items()}
    spoiled["reward"][given["share"] == 0] = 1e6
    torch.testing.assert_close(agent.critic_loss(replace(prepared, experience=spoiled))[0], losses)
    for _ in range(30):
        collect(worker)
        improve(worker)
    assert agent.updates > 5
    step, state = worker.seat.env_step, worker.seat.hidden_state
    assert set(agent.act(step, state).action) == set(names)
    assert agent.value(step, state).shape == (8,)
    worker.close()


def test_each_episode_has_one_policy_of_each_agents_ensemble() -> None:
    worker = make_worker("Speech", "maddpg", agent__policies=3, env__num=16)
    agent: Any = worker.agent
    assert agent.networks["actor"].size == 6
    begin(worker, 0)
    noise, state = agent.make_noise(Rows.all(16), torch.Generator().manual_seed(0)), worker.seat.hidden_state
    step = worker.seat.env_step
    drawn = agent.act(step, state, noise.next())
    assert len(set(drawn.experience["policy"].flatten().tolist())) == 3
    later = step._replace(first=torch.zeros(16, dtype=torch.bool))
    kept = agent.act(later, drawn.state, noise.next())
    assert kept.state[CHOSEN].equal(drawn.state[CHOSEN])
    # the output is that of the chosen policy alone
    inputs, first = agent.step_inputs(step), step.first[None]
    chosen = drawn.experience["policy"][None].clone()
    whole = torch.stack([agent.outputs(inputs, first, torch.full_like(chosen, k)) for k in range(3)], 3)
    index = chosen[..., None, None].expand(*chosen.shape, 1, 5)
    assert agent.outputs(inputs, first, chosen).equal(whole.gather(3, index).squeeze(3))
    assert not whole[..., 0, :].equal(whole[..., 1, :])
    # without noise the policies take turns
    turns, state = [], agent.initial_state(16)
    for _ in range(4):
        state = agent.act(step, state).state
        turns.append(int(state[CHOSEN][0, 0]))
    assert turns == [1, 2, 0, 1]
    for _ in range(10):
        collect(worker)
        improve(worker)
    assert agent.updates
    worker.close()


def test_box_actions_explore_by_noise_and_start_at_random() -> None:
    worker = make_worker("Meeting", "maddpg", agent__noise="ornstein_uhlenbeck", agent__noise_sigma=0.2)
    agent: Any = worker.agent
    begin(worker, 0)
    source = agent.make_noise(Rows.all(4), torch.Generator().manual_seed(0))
    step, state, noise = worker.seat.env_step, worker.seat.hidden_state, source.next()
    first = agent.act(step, state, noise).action
    assert torch.cat([first["left"], first["right"]], 1).equal(noise["random"])
    agent.updates = 1
    near, greedy = agent.act(step, state, noise), agent.act(step, state)
    for i, name in enumerate(("left", "right")):
        expected = (greedy.action[name] + 0.2 * noise["noise"][:, i : i + 1]).clamp(-1, 1)
        torch.testing.assert_close(near.action[name], expected)
    assert agent.schedule(0.5)["noise_sigma"] == pytest.approx(0.2)
    worker.close()


def test_priorities_are_mean_errors_of_the_agents_that_were_there() -> None:
    worker = make_worker("Mixed", "maddpg", agent__prioritized=True)
    agent: Any = worker.agent
    begin(worker, 0)
    batch = batch_of(worker)
    learned = agent.learn(batch, worker.updater)
    assert learned.priority is not None
    assert learned.priority.shape == (16,)
    assert agent.td_errors(batch).shape == (16,)
    worker.close()


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        ("Speech", {"agent__n_step": 3}, "agent.n_step is 3, but maddpg learns from single transitions"),
        ("Speech", {"agent__sequence": 8}, "agent.sequence is 8, but maddpg learns from single transitions"),
        ("Speech", {"network__body": "lstm"}, "maddpg learns from single transitions; use a feed-forward network"),
        ("Speech", {"agent__policies": 0}, "agent.policies is 0"),
        ("Speech", {"agent__normalize_reward": True}, "agent.normalize_reward is on, but maddpg learns from"),
        ("Speech", {"agent__policies": 2, "data__path": "x.npz"}, "maddpg does not learn from recorded episodes"),
    ],
)
def test_what_is_refused(world: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_worker(world, "maddpg", **changes)
