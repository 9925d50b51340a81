"""Mean and variance of several ranks' rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ludus.core.moments import Moments, pool_moments


def moments_of(x: np.ndarray) -> Moments:
    total, count = x.sum(0), len(x)
    squares = ((x - total / max(count, 1)) ** 2).sum(0)
    return Moments(torch.tensor(float(count)).double(), torch.tensor(total), torch.tensor(squares))


def pool(ranks: list[list[Moments]]) -> list[Moments]:
    given: list[Tensor] = []
    for parts in ranks:
        pool_moments(parts, lambda x: given.append(x) or x)
    return pool_moments(ranks[0], lambda _: torch.stack(given).sum(0))


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_rows_of_three_ranks_have_the_moments_of_all(offset: float) -> None:
    rng = np.random.default_rng(0)
    sizes = [(5, 0), (1, 7), (0, 300)]  # of two parts on each rank
    rows = [[rng.normal(offset + 3 * rank, 2, (n, 4)) for n in given] for rank, given in enumerate(sizes)]
    pooled = pool([[moments_of(x) for x in parts] for parts in rows])
    for part, moments in enumerate(pooled):
        whole = np.concatenate([parts[part] for parts in rows])
        assert float(moments.n) == len(whole)
        np.testing.assert_allclose(moments.mean, whole.mean(0), rtol=1e-12)
        np.testing.assert_allclose(moments.variance, whole.var(0), rtol=1e-6)


def test_no_rows_at_all_have_mean_and_variance_0() -> None:
    (moments,) = pool([[moments_of(np.zeros((0, 2)))]] * 2)
    assert moments.mean.tolist() == moments.variance.tolist() == [0, 0]


def test_one_rank_gets_back_what_it_gave_to_the_bit() -> None:
    g = torch.Generator().manual_seed(0)
    count = torch.randint(1, 2**20, (500,), generator=g)
    mean, variance = torch.randn(500, generator=g) * 1e3, torch.rand(500, generator=g) * 1e-3
    (moments,) = pool_moments([Moments.of(count, mean, variance)], lambda x: x)
    assert torch.equal(moments.n, count.double())
    assert torch.equal(moments.mean, mean.double())
    assert torch.equal(moments.variance, variance.double())
