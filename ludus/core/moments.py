"""Mean and variance over the rows of all ranks, by one sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ludus.core.types import SumOverRanks, single_rank


class Moments(NamedTuple):
    """Number, sum and squared deviations of some rows, in float64; the number broadcasts to the others."""

    n: Tensor
    total: Tensor  # Σ x
    squares: Tensor  # Σ (x − mean)²

    @classmethod
    def of(cls, n: Tensor, mean: Tensor, variance: Tensor) -> Moments:
        """Return the moments of rows with this mean and population variance.

        Products of an integer and a float32 number are exact in float64, so ``mean`` and ``variance`` give both back.
        """
        n = n.double()
        return cls(n, n * mean.double(), n * variance.double())

    @property
    def mean(self) -> Tensor:
        """The mean; 0 without rows."""
        return self.total / self.n.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """The population variance; 0 without rows."""
        return self.squares / self.n.clamp(min=1)


def pool_moments(parts: Sequence[Moments], sum_over_ranks: SumOverRanks) -> list[Moments]:
    """Return the moments of the rows of all ranks, given those of this rank, by one sum for all ``parts``.

    To the squares of all ranks, Σ n_i (m_i − m)² = Σ n_i m_i² − n m² is added (Chan et al. 1979). With one rank it is
    exactly 0, so it gets back what it gave. With several, the difference of float64 numbers is good enough for
    float32 rows, which cannot tell a variance below 1e-14 of their squared mean from none.
    """
    if sum_over_ranks is single_rank:
        return list(parts)
    flat = [x for part in parts for x in (*part, part.total * part.mean)]
    summed = sum_over_ranks(torch.cat([x.reshape(-1) for x in flat]))
    totals = iter(x.view_as(like) for x, like in zip(torch.split(summed, [x.numel() for x in flat]), flat, strict=True))
    pooled = []
    for _ in parts:
        moments, uncentred = Moments(next(totals), next(totals), next(totals)), next(totals)
        between = (uncentred - moments.total * moments.mean).clamp(min=0)
        pooled.append(moments._replace(squares=moments.squares + between))
    return pooled
