"""Losses and rewards of adversarial imitation against their equations in float64."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.ops.imitation import discriminator_loss, gradient_penalty, imitation_reward

logits = st.lists(st.floats(-30, 30), min_size=1, max_size=8)


@given(logits, st.integers(0, 2**8))
def test_the_loss_is_the_logistic_one(values: list[float], bits: int) -> None:
    x = np.array(values)
    expert = np.array([bits >> i & 1 for i in range(len(values))], np.float64)
    log_d, log_1_minus_d = -np.log1p(np.exp(-x)), -np.log1p(np.exp(x))
    expected = -(expert * log_d + (1 - expert) * log_1_minus_d)
    found = discriminator_loss(torch.tensor(x), torch.tensor(expert))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-8)  # torch: log(1 + e^x) is x from 20 on


def test_the_loss_is_finite_for_a_certain_discriminator() -> None:
    found = discriminator_loss(torch.tensor([500.0, -500.0]), torch.tensor([0.0, 1.0]))
    assert found.tolist() == [500, 500]


@given(logits)
def test_rewards(values: list[float]) -> None:
    x = np.array(values)
    given_logit = torch.tensor(x)
    positive, negative = imitation_reward(given_logit, "positive"), imitation_reward(given_logit, "negative")
    np.testing.assert_allclose(positive.numpy(), np.log1p(np.exp(x)), rtol=1e-9)
    np.testing.assert_allclose(negative.numpy(), -np.log1p(np.exp(-x)), rtol=1e-9)
    np.testing.assert_allclose(imitation_reward(given_logit, "logit").numpy(), (positive + negative).numpy(), atol=1e-9)


def test_gradient_penalty() -> None:
    gradient = np.random.default_rng(0).normal(size=(1, 5, 7))
    expected = (gradient**2).sum(-1)
    np.testing.assert_allclose(gradient_penalty(torch.tensor(gradient)).numpy(), expected, rtol=1e-12)
    zero = torch.zeros(1, 1, 3, requires_grad=True)
    gradient_penalty(zero).sum().backward()
    assert zero.grad is not None
    assert zero.grad.abs().max() == 0  # not NaN: the least penalty is that of a flat discriminator
