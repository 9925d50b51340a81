"""TRPO: Fisher-vector products and directions against a dense Fisher matrix, and the bound on the KL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from agents_setup import make_worker
from numpy.typing import NDArray
from torch import Tensor

from ludus.agents.trpo import POLICY
from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.updater import NonFiniteError
from ludus.networks.continuous_heads import Gaussian
from ludus.ops.natural_gradient import conjugate_gradient
from ludus.settings.settings import resolve_settings

TOY = "ludus.environments.toy:"
SMALL: dict[str, Any] = {"network__hidden": (4,), "network__lstm_size": 3, "agent__rollout": 7, "env__num": 3}
SMALL |= {"env__max_episode_steps": 4}  # every rollout has padding
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "discrete": ("CartPole-v1", {}),
    "masked": (TOY + "MaskedEnv", {}),
    "gaussian": (TOY + "TargetEnv", {}),
    "memory": ("CartPole-v1", {"network__body": "lstm"}),
    "masked memory": (TOY + "MaskedEnv", {"network__body": "lstm"}),
}
Array = NDArray[np.float64]


def rollout(kind: str, **changes: Any) -> tuple[Any, Any, Batch]:
    """A worker, its agent, and its first rollout."""
    environment, more = KINDS[kind]
    worker = make_worker(environment, "trpo", **SMALL | more | {"agent__minibatches": 1} | changes)
    begin(worker, 0)
    collect(worker)
    return worker, worker.agent, worker.cache.read()


def policy_batch(worker: Any, agent: Any, batch: Batch) -> Batch:
    rows = agent.with_shares(agent.prepare(batch).without_last_observation())
    with_old: Batch = agent.with_old_policy(rows)
    return with_old


def jacobian(outputs: Tensor, parameters: Any, index: list[Tensor], size: int) -> Array:
    """The derivative of each output by the flat parameters, ``[outputs, size]``."""
    rows = np.zeros((outputs.numel(), size))
    for row, x in zip(rows, outputs.flatten(), strict=True):
        found = torch.autograd.grad(x, parameters, retain_graph=True, materialize_grads=True)
        for place, gradient in zip(index, found, strict=True):
            row[place.numpy().ravel()] = gradient.double().numpy().ravel()
    return rows


def dense_fisher(worker: Any, agent: Any, batch: Batch) -> Array:
    """Σ share Jᵀ M J, with J the Jacobian of the distribution's parameters and M their Fisher matrix, in float64."""
    updater, parameters = worker.updater, agent.parameter_groups()[POLICY].parameters
    size = len(updater.parameters(POLICY))
    index = updater.split(torch.arange(size), POLICY)
    outputs, _ = agent.outputs(batch.observation, batch.state, batch.first, ["actor"])
    (output,) = outputs.values()
    share = batch.share.flatten().double().numpy()
    j = jacobian(output, parameters, index, size).reshape(len(share), -1, size)
    (head,) = agent.policy.heads.values()
    if isinstance(head, Gaussian):
        std = head.log_std.detach().double().exp().numpy()
        fisher = np.einsum("n,nkp,k,nkq->pq", share, j, 1 / std**2, j)
        place = index[-1].numpy().ravel()  # log_std is the last parameter; its Fisher information is 2
        fisher[place, place] += 2 * share.sum()
        return fisher
    logits = (
        next(iter(agent.policy.distribution(outputs, {}, batch.observation).values())).detach().double().flatten(0, 1)
    )
    p = logits.softmax(-1).numpy()
    m = np.einsum("nk,kl->nkl", p, np.eye(p.shape[1])) - np.einsum("nk,nl->nkl", p, p)
    return np.einsum("n,nkp,nkl,nlq->pq", share, j, m, j)


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_the_direction_are_those_of_the_dense_fisher_matrix(kind: str) -> None:
    worker, agent, batch = rollout(kind, agent__cg_damping=0.05)
    if kind != "gaussian":  # far from the uniform policy, where many entries vanish
        agent.networks["actor"].projections["policy/action"].weight.data.mul_(60)
    rows = policy_batch(worker, agent, batch)
    assert (~rows.real).any()
    matrix = dense_fisher(worker, agent, rows) + 0.05 * np.eye(len(worker.updater.parameters(POLICY)))
    product = agent.fisher_product(rows, worker.updater)
    for seed in range(3):
        v = torch.randn(len(matrix), generator=torch.Generator().manual_seed(seed))
        np.testing.assert_allclose(product(v).numpy(), matrix @ v.double().numpy(), rtol=1e-3, atol=1e-4)
    gradient, _ = worker.updater.gradient(agent.policy_loss, rows, POLICY)
    direction = conjugate_gradient(product, -gradient, 200).numpy()
    expected = np.linalg.solve(matrix, -gradient.double().numpy())
    np.testing.assert_allclose(direction, expected, rtol=1e-2, atol=1e-3 * np.abs(expected).max())
    worker.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_of_a_step_is_within_the_bound_and_the_objective_improves(kind: str) -> None:
    worker, agent, batch = rollout(kind, agent__target_kl=0.005)
    rows = policy_batch(worker, agent, batch)
    before, _ = agent.losses_and_kl(rows, worker.updater)
    metrics = agent.step_policy(rows, worker.updater)
    after, kl = agent.losses_and_kl(rows, worker.updater)
    assert agent.objective(after) < agent.objective(before)
    assert 0 < kl <= 0.005
    assert float(metrics["kl"]) == pytest.approx(float(kl))
    assert 0 < float(metrics["step_fraction"]) <= 1
    collect(worker)
    learned = agent.learn(worker.cache.read(), worker.updater)
    assert all(torch.isfinite(x) for x in learned.metrics.values())
    worker.close()


def test_a_step_that_nothing_accepts_leaves_the_policy_as_it_was() -> None:
    worker, agent, batch = rollout("discrete")
    start = worker.updater.parameters(POLICY).clone()
    agent.losses_and_kl = lambda *_: ({"policy": torch.zeros(())}, torch.zeros(()))  # never better
    metrics = agent.step_policy(policy_batch(worker, agent, batch), worker.updater)
    assert float(metrics["step_fraction"]) == float(metrics["kl"]) == 0
    assert torch.equal(worker.updater.parameters(POLICY), start)
    worker.close()


def test_equal_advantages_give_no_step() -> None:
    worker, agent, batch = rollout("discrete", agent__gae_lambda=0.0)
    rows = policy_batch(worker, agent, batch)
    rows.experience["advantage"].zero_()
    start = worker.updater.parameters(POLICY).clone()
    assert float(agent.step_policy(rows, worker.updater)["step_fraction"]) == 0
    assert torch.equal(worker.updater.parameters(POLICY), start)
    worker.close()


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step() -> None:
    worker, agent, batch = rollout("discrete")
    rows = policy_batch(worker, agent, batch)
    rows.experience["advantage"].fill_(torch.nan)
    with pytest.raises(NonFiniteError):
        agent.step_policy(rows, worker.updater)
    worker.close()


def test_the_log_has_the_objective_after_the_step() -> None:
    worker, agent, batch = rollout("discrete")
    metrics = agent.learn(batch, worker.updater).metrics
    assert float(metrics["loss/policy"]) < -1e-4  # before the step it is 0
    worker.close()


def test_the_entropy_is_part_of_the_objective() -> None:
    worker, agent, batch = rollout("discrete", agent__entropy_coef=0.5)
    agent.networks["actor"].projections["policy/action"].weight.data.mul_(60)
    rows = policy_batch(worker, agent, batch)
    rows.experience["advantage"].zero_()

    def mean_entropy() -> Tensor:
        logits = agent.outputs(rows.observation, rows.state, rows.first, ["actor"])[0]["policy/action"]
        log_p = logits.log_softmax(-1)
        entropy: Tensor = (-(log_p.exp() * log_p).sum(-1) * rows.share).sum()
        return entropy

    entropy = mean_entropy()
    expected = torch.autograd.grad(-0.5 * entropy, agent.parameter_groups()[POLICY].parameters)
    gradient, _ = worker.updater.gradient(agent.policy_loss, rows, POLICY)
    for found, wanted in zip(worker.updater.split(gradient, POLICY), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    before, _ = agent.losses_and_kl(rows, worker.updater)
    assert agent.objective(before) == pytest.approx(-0.5 * entropy.item(), rel=1e-5)
    metrics = agent.step_policy(rows, worker.updater)
    assert float(metrics["loss/policy"]) == 0  # the surrogate alone: there are no advantages
    assert -float(metrics["loss/entropy"]) == pytest.approx(mean_entropy().item(), rel=1e-5)
    assert mean_entropy() > entropy
    worker.close()


@pytest.mark.parametrize("distribution", ["gaussian", "gsde", "beta"])
def test_the_gradient_of_the_objective_is_its_slope(distribution: str) -> None:
    worker, agent, batch = rollout("gaussian", agent__entropy_coef=0.5, agent__distribution=distribution)
    rows = policy_batch(worker, agent, batch)
    gradient, _ = worker.updater.gradient(agent.policy_loss, rows, POLICY)
    start, step = worker.updater.parameters(POLICY).clone(), 1e-2 * gradient / gradient.norm()
    found = []
    for sign in (1, -1):
        worker.updater.assign(start + sign * step, POLICY)
        found.append(agent.objective(agent.losses_and_kl(rows, worker.updater)[0]))
    assert (found[0] - found[1]) / 2e-2 == pytest.approx(float(gradient.norm()), rel=0.02)
    worker.close()


def test_layers_that_differ_in_training_are_refused_in_the_actor() -> None:
    for piece, name in (('mlp(norm="batch")', "BatchNorm1d"), ("mlp(dropout=0.1)", "Dropout")):
        with pytest.raises(UserError, match=rf"but the actor has {name}, .*; use norm=\"layer\" and no dropout there"):
            make_worker("CartPole-v1", "trpo", network__net1d=piece)
        make_worker("CartPole-v1", "trpo", network__critic__net1d=piece).close()
    with pytest.raises(UserError, match=r"agent\.line_search_shrink is 1.0, so all steps .* must be less than 1"):
        make_worker("CartPole-v1", "trpo", agent__line_search_shrink=1.0)


def test_the_value_function_is_a_network_of_its_own() -> None:
    worker = make_worker("CartPole-v1", "trpo", network__shared="yes")
    assert set(worker.agent.networks) == {"actor", "critic"}  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"agent.minibatches is 99, more than the 64 transitions"):
        make_worker("CartPole-v1", "trpo", agent__minibatches=99)
    worker.close()


@pytest.mark.parametrize("nb_step", [100_000, 2_000_000])
def test_a_recurrent_network_has_no_more_minibatches_than_environments(nb_step: int) -> None:
    overrides = {"network.body": "lstm", "nb_step": nb_step, "env.num": 8}
    assert resolve_settings("CartPole-v1", "trpo", "none", None, overrides).settings.agent.minibatches <= 8
