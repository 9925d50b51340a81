# mypy: disable-error-code="no-untyped-call,arg-type"
"""Losses of TD3+BC, IQL and CQL against their equations in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ludus.ops import offline as ops

SEEDS = st.integers(0, 10_000)


def close(actual: Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=rtol, atol=atol)


@given(seed=SEEDS, alpha=st.floats(0.1, 10))
@settings(max_examples=30, deadline=None)
def test_td3_bc(seed: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    q, (action, recorded) = rng.normal(size=5) * 100, rng.uniform(-1, 1, (2, 5, 3))
    weight = alpha / np.mean(np.abs(q))
    expected = [sum((action[i] - recorded[i]) ** 2) / 3 - weight * q[i] for i in range(5)]
    given_q = torch.tensor(q, requires_grad=True)
    loss = ops.td3_bc_actor_loss(given_q, torch.tensor(action), torch.tensor(recorded), alpha, given_q.abs().mean())
    close(loss, expected)
    loss.sum().backward()
    close(given_q.grad, np.full(5, -weight))  # λ has no gradient


def test_td3_bc_with_values_of_zero_is_behaviour_cloning() -> None:
    action, recorded = torch.tensor([[0.5, 0.0]]), torch.tensor([[0.0, 0.0]])
    assert ops.td3_bc_actor_loss(torch.zeros(1), action, recorded, 2.5, torch.tensor(0.0)).tolist() == [0.125]


@given(seed=SEEDS, expectile=st.floats(0.01, 0.99))
@settings(max_examples=30, deadline=None)
def test_expectile_loss(seed: int, expectile: float) -> None:
    error = np.random.default_rng(seed).normal(size=(3, 4))
    expected = [[abs(expectile - (1 if u < 0 else 0)) * u * u for u in row] for row in error]
    close(ops.expectile_loss(torch.tensor(error), expectile), expected)


@pytest.mark.parametrize(("expectile", "expected"), [(0.5, 0.5), (0.9, 0.9), (0.1, 0.1)])
def test_the_expectile_of_a_fair_coin(expectile: float, expected: float) -> None:
    """Of 0 and 1, the τ-expectile is τ: τ(1 − v) = (1 − τ)v."""
    value, coin = torch.tensor(0.3, dtype=torch.float64, requires_grad=True), torch.tensor([0.0, 1.0])
    for _ in range(500):
        (gradient,) = torch.autograd.grad(ops.expectile_loss(coin - value, expectile).sum(), value)
        value = (value - 0.2 * gradient).detach().requires_grad_()
    assert value.item() == pytest.approx(expected, abs=1e-6)


def test_advantage_weights_are_clipped_and_finite() -> None:
    weight = ops.advantage_weight(torch.tensor([-1.0, 0.0, 1.0, 1e30, -1e30], dtype=torch.float64), 3.0, 100.0)
    close(weight, [math.exp(-3), 1, math.exp(3), 100, 0])


@given(seed=SEEDS, choices=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_conservative_loss_of_choices(seed: int, choices: int) -> None:
    rng = np.random.default_rng(seed)
    q, action = rng.normal(size=(4, choices)) * 5, rng.integers(0, choices, 4)
    mask = rng.random((4, choices)) < 0.5
    mask[np.arange(4), action] = True
    for allowed in (np.ones_like(mask), mask):
        expected = [
            math.log(sum(math.exp(q[i, a]) for a in range(choices) if allowed[i, a])) - q[i, action[i]]
            for i in range(4)
        ]
        dirty = torch.tensor(np.where(allowed, q, np.nan))
        close(ops.conservative_loss(dirty, torch.tensor(action), torch.tensor(allowed)), expected)
    close(ops.conservative_loss(torch.tensor(q[:, :1]), torch.zeros(4, dtype=torch.int64)), np.zeros(4), atol=1e-12)


def test_the_gradient_of_the_conservative_loss_is_the_policy_minus_the_data() -> None:
    """∂/∂Q: softmax(Q) − 1(a = a_t), the eq. 3 of the paper with μ = softmax(Q)."""
    q = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    ops.conservative_loss(q, torch.tensor([1])).sum().backward()
    close(q.grad, q.detach().softmax(-1) - torch.tensor([[0.0, 1.0, 0.0]]))


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_sampled_logsumexp(seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, log_density = rng.normal(size=(6, 3, 2)) * 3, rng.normal(size=(6, 3, 1))
    expected = [
        [math.log(sum(math.exp(q[i, b, e]) / math.exp(log_density[i, b, 0]) for i in range(6)) / 6) for e in range(2)]
        for b in range(3)
    ]
    close(ops.sampled_logsumexp(torch.tensor(q), torch.tensor(log_density)), expected)


def test_sampled_logsumexp_estimates_the_integral_whatever_the_density() -> None:
    """∫ exp(a) da over [−1, 1] is e − 1/e: from uniform actions, and from a density that grows with a."""
    rng = np.random.default_rng(0)
    uniform = rng.uniform(-1, 1, 200_000)
    sloped = 2 * np.sqrt(rng.uniform(0, 1, 200_000)) - 1  # density (a + 1) / 2
    actions = torch.tensor(np.concatenate([uniform, sloped]))
    log_density = torch.cat([torch.full((200_000,), -math.log(2)), ((actions[200_000:] + 1) / 2).log()])
    estimate = ops.sampled_logsumexp(actions, log_density)
    assert float(estimate) == pytest.approx(math.log(math.e - 1 / math.e), abs=5e-3)
