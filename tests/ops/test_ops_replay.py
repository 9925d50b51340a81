"""Importance weights and means over what was drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.ops.replay import counted, importance_weights


@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 1_000_000), st.floats(0, 1))
def test_importance_weights(seed: int, batch: int, size: int, beta: float) -> None:
    p = np.random.default_rng(seed).random(batch) + 1e-6
    expected = [(size * x) ** -beta / max((size * y) ** -beta for y in p) for x in p]
    for given_size, given_beta in ((size, beta), (torch.tensor(size), torch.tensor(beta).double())):
        result = importance_weights(torch.tensor(p), given_size, given_beta)
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)


def test_full_correction_is_the_uniform_mean() -> None:
    """With β = 1 the weighted mean of what is drawn with P is, up to the scale, the mean over all."""
    p, x = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), torch.tensor([5.0, -1.0, 2.0, 8.0]).double()
    weight = importance_weights(p, 4, 1.0)
    assert weight.amax() == 1
    assert ((p * weight * x).sum() / (p * weight).sum()).item() == pytest.approx(x.mean().item())
    assert importance_weights(p, 4, 0.0).tolist() == [1, 1, 1, 1]


def test_counted() -> None:
    weight = torch.tensor([[0.5, 0.3, 1.0], [0.7, 0.25, 0.25]], requires_grad=True)
    real = torch.tensor([[True, False, True], [False, True, True]])
    share = counted(weight, real)
    assert share.tolist() == [[0.125, 0.0, 0.25], [0.0, 0.0625, 0.0625]]
    assert not share.requires_grad
    assert counted(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[0, 0, 0], [0, 0, 0]]
    loss = torch.tensor([[1.0, 9.0, 3.0], [9.0, 2.0, 4.0]])
    assert (loss * share).sum().item() == pytest.approx((0.5 * 1 + 3 + 0.25 * 6) / 4)
