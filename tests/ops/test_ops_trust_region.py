# mypy: disable-error-code="no-untyped-call,arg-type"
"""ACER's trust region: the projection and the closed-form gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ludus.ops import trust_region as ops
from ludus.ops.distributions import categorical_entropy, categorical_kl, mask_logits


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 4), size=st.integers(1, 6), delta=st.floats(0, 2))
@settings(max_examples=60, deadline=None)
def test_projection_is_the_closest_feasible_gradient(seed: int, rows: int, size: int, delta: float) -> None:
    rng = np.random.default_rng(seed)
    g, k = rng.normal(size=(2, rows, size)), rng.normal(size=(2, rows, size))
    z = ops.trust_region_gradient(torch.tensor(g), torch.tensor(k), delta).numpy()
    for i in np.ndindex(2, rows):
        excess = k[i] @ g[i] - delta
        expected = g[i] if excess <= 0 else g[i] - excess / (k[i] @ k[i]) * k[i]
        np.testing.assert_allclose(z[i], expected, atol=1e-9)
        assert k[i] @ z[i] <= delta + 1e-9
        other = g[i] + rng.normal(size=size)  # nothing that is allowed is nearer
        if k[i] @ other <= delta:
            assert np.sum((z[i] - g[i]) ** 2) <= np.sum((other - g[i]) ** 2) + 1e-9


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_zero_kl_gradient_leaves_the_gradient_unchanged(delta: float) -> None:
    g, k = torch.randn(3, 4), torch.zeros(3, 4)
    assert torch.equal(ops.trust_region_gradient(g, k, delta), g)
    assert torch.isfinite(ops.trust_region_gradient(g, k + 1e-25, delta)).all()


def test_rows_are_independent() -> None:
    g, k = torch.ones(2, 2), torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    assert ops.trust_region_gradient(g, k, 0.5).tolist() == [[0.5, 1.0], [1.0, 0.125]]
    k[1] = torch.nan
    assert ops.trust_region_gradient(g, k, 0.5)[0].tolist() == [0.5, 1.0]


def test_loss_gradient_is_the_projection() -> None:
    logits, g, k = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(3))
    ops.trust_region_loss(logits, g, k, 0.1).sum().backward()
    assert logits.grad is not None
    assert torch.equal(-logits.grad, ops.trust_region_gradient(g, k, 0.1))
    assert g.grad is None
    assert k.grad is None


def gradient_of(function: object, at: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(function(at).sum(), at)  # type: ignore[operator]
    return gradient


def test_kl_gradients() -> None:
    average, logits = (torch.randn(2, 3, 5, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    expected = gradient_of(lambda x: categorical_kl(average, x), logits)
    torch.testing.assert_close(ops.kl_gradient_logits(average, logits), expected)


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_policy_gradient(coef: float) -> None:
    weights, logits = (torch.randn(2, 3, 5, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    before = weights.clone()
    expected = gradient_of(lambda x: (weights * x.log_softmax(-1)).sum(-1) + coef * categorical_entropy(x), logits)
    torch.testing.assert_close(ops.policy_gradient_logits(weights, logits, coef), expected)
    assert torch.equal(weights, before)


def test_masked_choices_have_zero_gradient() -> None:
    mask = torch.tensor([[1, 0, 1]])
    logits, average = (mask_logits(torch.randn(1, 3), mask) for _ in range(2))
    weights = torch.tensor([[0.5, 0.0, -2.0]])
    g, k = ops.policy_gradient_logits(weights, logits, 0.1), ops.kl_gradient_logits(average, logits)
    assert g[0, 1] == k[0, 1] == 0
    leaf = logits.clone().requires_grad_()
    loss = ops.trust_region_loss(leaf, g, k, 0.01)
    assert loss.isfinite().all()


def test_results_have_no_gradient() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    results = [
        ops.trust_region_gradient(x, x, 1.0),
        ops.kl_gradient_logits(x, x),
        ops.policy_gradient_logits(x, x, 0.1),
    ]
    assert not any(result.requires_grad for result in results)
