# mypy: disable-error-code="no-untyped-call,arg-type"
"""C51's projection and the quantile loss against their equations, and numbers from other projects' tests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import ops_off_policy_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ludus.ops import distributional as ops
from ludus.ops.q_learning import double_q_value, greedy, td_target

nan = math.nan


def close(actual: Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=rtol, atol=atol)


# Categorical.


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    atoms=st.integers(2, 9),
    source=st.integers(1, 9),
    low=st.floats(-5, 5),
)
@settings(max_examples=60, deadline=None)
def test_projection(seed: int, rows: int, atoms: int, source: int, low: float) -> None:
    rng = np.random.default_rng(seed)
    support = np.linspace(low, low + 3, atoms)
    places = rng.uniform(low - 2, low + 5, (2, rows, source))
    places[rng.random(places.shape) < 0.3] = rng.choice(support)  # some lie on an atom
    p = rng.dirichlet(np.ones(source), (2, rows))
    result = ops.c51_project(torch.tensor(places), torch.tensor(p), torch.tensor(support))
    for index in np.ndindex(2, rows):
        close(result[index], reference.c51_project(places[index], p[index], support))
    close(result.sum(-1), np.ones((2, rows)))
    kept = np.clip(places, support[0], support[-1])  # the projection preserves the mean
    close((result * torch.tensor(support)).sum(-1), (p * kept).sum(-1))


@pytest.mark.parametrize(
    ("support", "places", "p", "expected"),
    [
        ([4, 5, 6, 7, 8], [0, 2, 4, 6, 8], [0.1, 0.6, 0.1, 0.1, 0.1], [0.8, 0, 0.1, 0, 0.1]),
        ([4, 5, 6, 7, 8], [1, 3, 4, 5, 6], [0.1, 0.2, 0.5, 0.1, 0.1], [0.8, 0.1, 0.1, 0, 0]),
        ([0, 4, 8, 12, 16], [0, 2, 4, 6, 8], [0.1, 0.2, 0.2, 0.2, 0.3], [0.2, 0.4, 0.4, 0, 0]),
        ([0, 4, 8, 12, 16], [8, 9, 10, 12, 14], [0.1, 0.2, 0.4, 0.1, 0.2], [0, 0, 0.45, 0.45, 0.1]),
        ([3, 4, 5, 6, 7], [4, 3, 2, 1, 0], [0.1, 0.2, 0.1, 0.3, 0.3], [0.9, 0.1, 0, 0, 0]),
    ],
)
def test_dopamine_projections(support: list[float], places: list[float], p: list[float], expected: list[float]) -> None:
    given_tensors = [torch.tensor([x], dtype=torch.float32) for x in (places, p)]
    result = ops.c51_project(*given_tensors, torch.tensor(support, dtype=torch.float32))
    close(result[0], expected, 1e-6, 1e-7)
    close(torch.tensor(reference.c51_project(*(np.array(x, dtype=float) for x in (places, p, support)))), expected)


@pytest.mark.parametrize(("low", "high", "n"), [(-10, 10, 51), (0, 500, 101), (-1, 2, 7)])
def test_projection_on_the_same_support_is_the_identity(low: float, high: float, n: int) -> None:
    support = ops.c51_support(low, high, n)
    assert support.tolist()[0] == low
    assert support.tolist()[-1] == high
    p = torch.rand(4, 3, n).softmax(-1)
    places = td_target(torch.zeros(4, 3, 1), torch.ones(4, 3, 1), support)
    torch.testing.assert_close(ops.c51_project(places, p, support), p, rtol=0, atol=1e-6)


def test_terminal_distribution_is_at_the_reward() -> None:
    support = ops.c51_support(-2, 2, 5)
    places = td_target(torch.tensor([[1.0], [1.25], [9.0]]), torch.zeros(3, 1), torch.full((3, 5), nan))
    result = ops.c51_project(places, torch.rand(3, 5).softmax(-1), support)
    expected = [[0, 0, 0, 1, 0], [0, 0, 0, 0.75, 0.25], [0, 0, 0, 0, 1]]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float32))


def test_nan_affects_only_its_row() -> None:
    support, p = ops.c51_support(-2, 2, 5), torch.full((3, 5), 0.2)
    places = support.repeat(3, 1)
    places[1] = nan
    result = ops.c51_project(places, p, support)
    torch.testing.assert_close(result[[0, 2]], p[[0, 2]])
    assert result[1].isnan().any()


ATOMS = torch.tensor([0.5, 1.0, 1.5])
LOGITS_TM1 = torch.tensor([[0.0, 9, 0], [9, 0, 9], [0, 9, 0], [9, 9, 0], [9, 0, 9]])  # of the actions taken
REWARD, DISCOUNT = torch.tensor([0.5, 0.0, 0.5, 0.8, -0.1]), torch.tensor([0.8, 1.0, 0.8, 0.0, 1.0])
LOGITS_T = torch.tensor(
    [
        [[1.0, 1, 1], [9, 0, 9], [1, 0, 0], [0, 0, 9]],
        [[9, 9, 0], [9, 0, 0], [1, 1, 1], [9, -9, 0]],
        [[1, 1, 1], [9, 0, 9], [0, 0, 9], [1, 0, 0]],
        [[9, 9, 0], [9, 0, 0], [1, 1, 1], [9, -9, 0]],
        [[9, 9, 0], [9, 0, 0], [0, 9, 9], [9, -9, 0]],
    ]
)
SELECTOR = torch.tensor([[1.0, 0, 0, 9], [9, 0, 1, 1], [1, 9, 1, 1], [0, 1, 0, 9], [1, 1, 1, 9]])


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ((LOGITS_T.softmax(-1) * ATOMS).sum(-1), [8.998915, 3.6932087, 8.998915, 0.69320893, 5.1929307]),
        (SELECTOR, [8.998915, 5.192931, 5.400247, 0.693209, 0.693431]),
    ],
    ids=["q", "double"],
)
def test_rlax_categorical_q_learning(selector: Tensor, expected: list[float]) -> None:
    chosen = LOGITS_T.softmax(-1)[torch.arange(5), greedy(selector)]
    places = td_target(REWARD.unsqueeze(-1), DISCOUNT.unsqueeze(-1), ATOMS)
    loss = ops.c51_cross_entropy(LOGITS_TM1, ops.c51_project(places, chosen, ATOMS))
    close(loss, expected, 1e-5)


def test_cross_entropy_gradient_is_p_minus_target() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    target = torch.rand(2, 3, 5, dtype=torch.float64).softmax(-1).requires_grad_()
    ops.c51_cross_entropy(logits, target).sum().backward()
    torch.testing.assert_close(logits.grad, (logits.softmax(-1) - target).detach())
    assert target.grad is None


# Quantiles.


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    n=st.integers(1, 6),
    m=st.integers(1, 6),
    kappa=st.sampled_from([0.0, 0.3, 1, 2]),
)
@settings(max_examples=60, deadline=None)
def test_quantile_huber(seed: int, rows: int, n: int, m: int, kappa: float) -> None:
    rng = np.random.default_rng(seed)
    quantiles, target, taus = rng.normal(size=(2, rows, n)), rng.normal(size=(2, rows, m)), rng.random((2, rows, n))
    given_tensors = torch.tensor(quantiles), torch.tensor(target)
    loss = ops.quantile_huber(*given_tensors, torch.tensor(taus), kappa)
    shared = ops.quantile_huber(*given_tensors, ops.quantile_midpoints(n).double(), kappa)
    middle = (2 * np.arange(n) + 1) / (2 * n)
    for i in np.ndindex(2, rows):
        close(loss[i], reference.quantile_huber(quantiles[i], target[i], taus[i], kappa))
        close(shared[i], reference.quantile_huber(quantiles[i], target[i], middle, kappa), 1e-6)


@pytest.mark.parametrize(("kappa", "expected"), [(0.0, [2.0, 2.2]), (2.0, [2.5, 8.5 / 3])])
def test_rlax_quantile_loss(kappa: float, expected: list[float]) -> None:
    quantiles, taus = torch.tensor([[-1.0, 3.0], [-1.0, 3.0]]), torch.tensor([[0.2, 0.7], [0.0, 0.4]])
    target = torch.tensor([[-3.0, 4.0, 2.0], [-3.0, 4.0, 2.0]])
    close(ops.quantile_huber(quantiles, target, taus, kappa), expected, 1e-6)
    for row in range(2):
        arrays = (x[row].double().numpy() for x in (quantiles, target, taus))
        assert reference.quantile_huber(*arrays, kappa) == pytest.approx(expected[row])


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0])
def test_quantile_gradient(kappa: float) -> None:
    torch.manual_seed(0)
    quantiles = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    taus = torch.rand(2, 3, 4, dtype=torch.float64)
    before = quantiles.detach().clone(), target.detach().clone()
    assert torch.autograd.gradcheck(lambda x: ops.quantile_huber(x, target.detach(), taus, kappa), [quantiles])
    ops.quantile_huber(quantiles, target, taus, kappa).sum().backward()
    assert target.grad is None
    assert quantiles.grad is not None
    assert torch.equal(quantiles, before[0])
    assert torch.equal(target, before[1])


def test_gradient_descent_finds_the_quantiles() -> None:
    target = torch.arange(1, 101, dtype=torch.float64).expand(1, 100)
    quantiles, taus = torch.full((1, 4), 50.0, dtype=torch.float64), ops.quantile_midpoints(4).double()
    for _ in range(3000):
        quantiles.requires_grad_()
        (gradient,) = torch.autograd.grad(ops.quantile_huber(quantiles, target, taus, 0.0).sum(), quantiles)
        quantiles = quantiles.detach() - 0.5 * gradient
    close(quantiles[0], [13, 38, 63, 88], 0, 1)


def test_cosine_embedding() -> None:
    taus = torch.rand(2, 3, 5, dtype=torch.float64)
    result = ops.cosine_embedding(taus, 4)
    assert result.shape == (2, 3, 5, 4)
    close(result, np.cos(np.pi * np.arange(4) * taus.numpy()[..., None]))
    assert ops.cosine_embedding(torch.rand(3), 4).dtype == torch.float32


def test_targets_have_no_gradient() -> None:
    p, support = torch.rand(2, 5, requires_grad=True), ops.c51_support(-1, 1, 5)
    assert not ops.c51_project(support.expand(2, 5), p, support).requires_grad
    assert not double_q_value(p, p).requires_grad


@pytest.mark.parametrize(("critics", "dropped"), [(1, 0), (1, 2), (3, 1)])
def test_the_largest_quantiles_of_all_critics_are_dropped(critics: int, dropped: int) -> None:
    quantiles = torch.randn(2, 4, critics, 5, dtype=torch.float64, requires_grad=True)
    found = ops.truncated_quantiles(quantiles, dropped)
    assert not found.requires_grad
    for i in np.ndindex(2, 4):
        pooled = sorted(quantiles.detach().numpy()[i].ravel())
        close(found[i], np.array(pooled[: critics * (5 - dropped)]))


def test_the_loss_of_quantile_critics_is_a_mean_over_pairs_and_a_sum_over_critics() -> None:
    quantiles = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    taus = ops.quantile_midpoints(4).double()
    loss = ops.quantile_critic_loss(quantiles, target, taus)
    for b in range(3):
        arrays = quantiles.detach().numpy()[b], target.detach().numpy()[b], taus.numpy()
        close(
            loss[b],
            np.array(sum(reference.quantile_huber(theta, arrays[1], arrays[2], 1.0) / 4 for theta in arrays[0])),
        )
    loss.sum().backward()
    assert target.grad is None
