"""Losses of TD3+BC, CQL and IQL from their equations, with real networks; and what these agents refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from actor_setup import POINT, TOY, make_worker, random_batch, scalars

from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState

PLAIN: dict[str, Any] = {"agent__normalize_observation": False}


def worker_with_batch(environment: str, name: str, **changes: Any) -> tuple[Any, Batch]:
    """A worker and a batch that it collected."""
    worker: Any = make_worker(environment, name, **changes)
    begin(worker, 0)
    while not worker.cache.ready():
        collect(worker)
    return worker, worker.cache.read()


def test_td3_bc_scales_q_and_imitates() -> None:
    agent: Any = make_worker(POINT, "td3_bc", agent__bc_alpha=1.5, **PLAIN).agent
    batch = agent.prepare(random_batch("observation", 16))
    seen, first = {"observation": batch.observation["observation"][:1]}, batch.first[:1]
    with torch.no_grad():
        action = agent.run("actor", seen, HiddenState(), first)[0]["policy"].tanh()
        q = agent.q(seen, action, HiddenState(), first)[0, :, 0].double().numpy()
    distance = np.square(action[0].double().numpy() - batch.action["action"][0].double().numpy()).mean(-1)
    expected = (distance - 1.5 / np.abs(q).mean() * q).mean()
    assert scalars(agent.actor_loss(batch)[0])["actor"] == pytest.approx(expected, rel=1e-5)


def test_td3_bc_without_values_moves_to_the_recorded_actions() -> None:
    worker = make_worker(POINT, "td3_bc", agent__bc_alpha=0.0, agent__learning_rate=3e-3, **PLAIN)
    agent: Any = worker.agent
    batch = random_batch("observation", 16)
    losses = [float(agent.learn(batch, worker.updater).metrics["loss/actor"]) for _ in range(200)]
    assert losses[-1] < 0.2 * losses[2]


@pytest.mark.parametrize("quantiles", [0, 5])
def test_the_conservative_loss_of_sac(quantiles: int) -> None:
    more = {"agent__conservative_samples": 3, "agent__quantiles": quantiles}
    agent: Any = make_worker(POINT, "cql", **more).agent
    batch = agent.prepare(random_batch("observation", 16))
    seen, first = {"observation": batch.observation["observation"][:1]}, batch.first[:1]

    def q(action: Any) -> Any:
        return agent.q(seen, action[None], HiddenState(), first)[0].double().numpy()  # [B, critics]

    with torch.no_grad():
        mean, log_std, _ = agent.policy(seen, HiddenState(), first)
        total = np.zeros((16, 2))
        for noise in batch.experience["uniform"]:
            assert noise.abs().max() <= 1
            total += np.exp(q(noise)) / 0.5**3
        for noise in batch.experience["several"]:
            u = mean[0] + log_std[0].exp() * noise
            gaussian = torch.distributions.Normal(mean[0], log_std[0].exp()).log_prob(u).sum(-1)
            density = (gaussian - (1 - u.tanh() ** 2).log().sum(-1)).double().numpy()
            total += np.exp(q(u.tanh()) - density[:, None])
        gap = np.log(total / 6) - q(batch.action["action"][0].tanh())
    losses, _ = agent.critic_loss(batch)
    assert scalars(losses)["conservative"] == pytest.approx(gap.sum(-1).mean(), rel=1e-4)
    assert agent.loss_coefficients()["conservative"] == 5.0


def test_the_conservative_loss_lowers_values_of_other_actions() -> None:
    worker = make_worker(POINT, "cql", agent__learning_rate=1e-3, agent__conservative_samples=4)
    agent: Any = worker.agent
    batch = random_batch("observation", 16)
    gaps = [float(agent.learn(batch, worker.updater).metrics["loss/conservative"]) for _ in range(150)]
    assert gaps[-1] < gaps[0] - 1  # below 0: recorded actions have higher values than others


@pytest.mark.parametrize("values", ["expected", "quantile", "categorical", "implicit"])
def test_the_conservative_loss_of_dqn(values: str) -> None:
    worker, batch = worker_with_batch(TOY + "MaskedEnv", "discrete_cql", agent__values=values, agent__atoms=5)
    agent: Any = worker.agent
    batch = agent.prepare(batch)
    taus = batch.experience.get("taus")
    with torch.no_grad():
        seen = {"observation": batch.observation["observation"][:1]}
        outputs, _ = agent.run("q", seen, HiddenState(), batch.first[:1])
        q = agent.head.q(outputs, taus)[0].double().numpy()
    allowed, taken = batch.observation["action_mask"][0].bool().numpy(), batch.action["action"][0].numpy()
    gaps = [math.log(np.exp(q[i][allowed[i]]).sum()) - q[i, taken[i]] for i in range(16)]
    losses, _ = agent.compute_loss(batch)
    assert scalars(losses)["conservative"] == pytest.approx(np.mean(gaps), rel=1e-4)


def test_the_losses_of_iql() -> None:
    options: dict[str, Any] = {"agent__expectile": 0.8, "agent__temperature": 2.0}
    agent: Any = make_worker(POINT, "iql", **options, **PLAIN).agent
    raw = random_batch("observation", 16)
    batch = agent.with_shares(raw)
    seen, later = ({"observation": batch.observation["observation"][i : i + 1]} for i in (0, 1))
    first = batch.first[:1]
    with torch.no_grad():
        for p in agent.target.parameters():
            p += 0.01  # so that targets differ
        taken = seen | {"taken_action": batch.action["action"]}
        q, target_q = (agent.q(taken, first, target)[0].double().numpy() for target in (False, True))
        v, next_v = (
            agent.run("value", x, HiddenState(), first)[0]["value"][0, :, 0].double().numpy() for x in (seen, later)
        )
        outputs, _ = agent.run("actor", seen, HiddenState(), first)
        mean, log_std = outputs["policy/action"][0], agent.policy.heads["policy/action"].log_std
        log_prob = torch.distributions.Normal(mean, log_std.exp()).log_prob(batch.action["action"][0]).sum(-1)
    advantage = target_q.min(-1) - v
    y = batch.reward[0].numpy() + batch.discount[0].numpy() * next_v
    expected = {
        "value": np.mean(np.abs(0.8 - (advantage < 0)) * advantage**2),
        "critic": np.mean(np.square(q - y[:, None]).sum(-1)),
        "actor": np.mean(-np.minimum(np.exp(2 * advantage), 100) * log_prob.double().numpy()),
    }
    losses, metrics = agent.compute_loss(batch)
    assert scalars(losses) == pytest.approx(expected, rel=1e-4)
    assert float(metrics["value"]) == pytest.approx(v.mean(), rel=1e-4)


@pytest.mark.parametrize("loss", ["value", "critic", "actor"])
def test_each_loss_of_iql_moves_its_own_network(loss: str) -> None:
    agent: Any = make_worker(POINT, "iql").agent
    losses, _ = agent.compute_loss(agent.with_shares(random_batch("observation", 16)))
    losses[loss].backward()
    moved = {name for name, network in agent.networks.items() if any(p.grad.any() for p in network.parameters())}
    assert moved == {loss}


@pytest.mark.parametrize("environment", ["MaskedEnv", "MixedActionEnv", "TargetEnv"])
@pytest.mark.parametrize("prioritized", [False, True])
def test_iql_learns_from_any_actions(environment: str, prioritized: bool) -> None:
    more = {"agent__n_step": 3, "agent__prioritized": prioritized}
    worker, batch = worker_with_batch(TOY + environment, "iql", **more)
    learned = worker.agent.learn(batch, worker.updater)
    assert all(bool(x.isfinite().all()) for x in learned.metrics.values())
    assert (learned.priority is not None) == prioritized


def test_iql_has_a_value_and_a_distribution() -> None:
    worker, _ = worker_with_batch(TOY + "MaskedEnv", "iql")
    step, state = worker.seat.env_step, worker.seat.hidden_state
    assert worker.agent.value(step, state).shape == (worker.manager.batch,)
    probabilities = worker.agent.distribution(step, state)["action"]["probabilities"]
    assert ((probabilities > 0) == step.observation["action_mask"].bool()).all()


@pytest.mark.parametrize(
    ("agent", "changes", "message"),
    [
        ("iql", {"agent__expectile": 1.0}, r"agent.expectile is 1; it must be between 0 and 1, such as 0.7."),
        ("iql", {"agent__temperature": -1.0}, r"agent.temperature is -1.0; it must be 0 or greater."),
        ("iql", {"agent__sequence": 4}, r"agent.sequence is 4, but iql learns from single transitions; set it to 0."),
        ("iql", {"network__body": "lstm"}, r"iql learns from single transitions, but a network is recurrent"),
        ("td3_bc", {"agent__bc_alpha": -1.0}, r"agent.bc_alpha is -1.0; it must be 0 or greater."),
        ("cql", {"agent__conservative_coef": -1.0}, r"agent.conservative_coef is -1.0; it must be 0 or greater."),
        ("cql", {"agent__conservative_samples": 0}, r"agent.conservative_samples is 0; it must be greater than 0."),
        ("cql", {"agent__sequence": 4}, r"agent.conservative_coef is 5, which works on single transitions with targ"),
        ("crossq", {"agent__conservative_coef": 1.0}, r"set agent.target_networks on, or agent.conservative_coef to"),
        ("discrete_cql", {"agent__conservative_coef": -1.0}, r"agent.conservative_coef is -1.0; it must be 0 or grea"),
    ],
)
def test_values_that_cannot_train(agent: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_worker("CartPole-v1" if agent == "discrete_cql" else POINT, agent, **changes)
