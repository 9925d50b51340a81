"""Means over what was drawn."""

from __future__ import annotations

import pytest
import torch

from ludus.ops.replay import counted


def test_counted() -> None:
    weight = torch.tensor([[0.5, 0.3, 1.0], [0.7, 0.25, 0.25]], requires_grad=True)
    real = torch.tensor([[True, False, True], [False, True, True]])
    share = counted(weight, real)
    assert share.tolist() == [[0.125, 0.0, 0.25], [0.0, 0.0625, 0.0625]]
    assert not share.requires_grad
    assert counted(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[0, 0, 0], [0, 0, 0]]
    loss = torch.tensor([[1.0, 9.0, 3.0], [9.0, 2.0, 4.0]])
    assert (loss * share).sum().item() == pytest.approx((0.5 * 1 + 3 + 0.25 * 6) / 4)
