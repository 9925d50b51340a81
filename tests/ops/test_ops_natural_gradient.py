"""Conjugate gradients, the step to a KL bound and the line search, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ludus.ops import natural_gradient as ops

Array = NDArray[np.float64]


def positive_definite(seed: int, size: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size, size))
    return root @ root.T + 0.1 * np.eye(size), rng.normal(size=size)


def product_of(matrix: Array) -> ops.Product:
    return lambda v: torch.tensor(matrix) @ v


@given(seed=st.integers(0, 10_000), size=st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_conjugate_gradients_solve_the_system_in_as_many_steps_as_it_has_rows(seed: int, size: int) -> None:
    matrix, b = positive_definite(seed, size)
    x = ops.conjugate_gradient(product_of(matrix), torch.tensor(b), 4 * size, tolerance=1e-24)
    np.testing.assert_allclose(x.numpy(), np.linalg.solve(matrix, b), rtol=1e-6, atol=1e-8)


def test_each_step_is_the_best_of_its_krylov_space() -> None:
    """After k steps x minimizes ½xᵀFx − bᵀx over span{b, Fb, …, Fᵏ⁻¹b}."""
    matrix, b = positive_definite(3, 6)
    for k in range(1, 5):
        x = ops.conjugate_gradient(product_of(matrix), torch.tensor(b), k).numpy()
        space = np.stack([np.linalg.matrix_power(matrix, i) @ b for i in range(k)], 1)
        space, _ = np.linalg.qr(space)
        expected = space @ np.linalg.solve(space.T @ matrix @ space, space.T @ b)
        np.testing.assert_allclose(x, expected, rtol=1e-6)


def test_a_gradient_of_zero_gives_no_step() -> None:
    matrix, _ = positive_definite(0, 4)
    x = ops.conjugate_gradient(product_of(matrix), torch.zeros(4, dtype=torch.float64), 10)
    assert x.tolist() == [0] * 4
    assert ops.step_to_kl(x, product_of(matrix), 0.01).tolist() == [0] * 4


def test_it_stops_where_the_residual_is_gone() -> None:
    calls: list[Tensor] = []
    ops.conjugate_gradient(lambda v: calls.append(v) or 2 * v, torch.ones(3), 10)  # type: ignore[func-returns-value]
    assert len(calls) == 1


@pytest.mark.parametrize("delta", [0.01, 1.0])
def test_the_quadratic_kl_of_the_step_is_the_bound(delta: float) -> None:
    matrix, x = positive_definite(1, 5)
    step = ops.step_to_kl(torch.tensor(x), product_of(matrix), delta).numpy()
    assert 0.5 * step @ matrix @ step == pytest.approx(delta)
    np.testing.assert_allclose(step / np.linalg.norm(step), x / np.linalg.norm(x))


def test_the_line_search_takes_the_longest_step_that_is_accepted() -> None:
    tried: list[float] = []

    def accepts(fraction: float) -> bool:
        tried.append(fraction)
        return fraction < 0.6

    assert ops.line_search(accepts, 0.8, 10) == pytest.approx(0.512)
    assert tried == pytest.approx([1, 0.8, 0.64, 0.512])
    assert ops.line_search(lambda fraction: False, 0.8, 10) == 0


def test_the_surrogate_is_the_ratio_times_the_advantage() -> None:
    log_ratio = torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, -1.0, 3.0], dtype=torch.float64, requires_grad=True)
    loss = ops.surrogate_loss(log_ratio, advantage)
    np.testing.assert_allclose(loss.detach().numpy(), -np.exp([0, 0.5, -1]) * [2, -1, 3])
    loss.sum().backward()
    assert advantage.grad is None
