"""Running statistics in float64, and the normalizers made of them. They change by an explicit ``update`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ludus.core.spec import Spec, Specs
from ludus.core.types import SumOverRanks, Tensors, single_rank

SMALLEST = 1e-12  # a variance up to this is none: what never varied is not scaled, lest its first change be a blow
CLIP = 10.0  # normalized observations stay within ±this


class RunningStatistics(nn.Module):
    """Mean and variance of all rows seen so far, by the merge of Chan et al. (1979)."""

    count: Tensor
    mean: Tensor
    m2: Tensor  # the sum of squared deviations
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))  # the mean and 1/std in float32, ready for use
        self.register_buffer("scale", torch.ones(shape))

    @property
    def variance(self) -> Tensor:
        """The variance (of the population), 0 before there is data."""
        return self.m2 / self.count.clamp(min=1)

    @torch.no_grad()
    def update(self, x: Tensor, weight: Tensor, sum_over_ranks: SumOverRanks = single_rank) -> None:
        """Take rows ``x`` ``[…, *shape]``; those of zero ``weight`` ``[…]`` do not count and may hold anything."""
        x = x.reshape(-1, *self.mean.shape).double()
        w = weight.reshape(-1, *[1] * self.mean.dim()).double()
        x = torch.where(w > 0, x, 0.0)
        total = sum_over_ranks(torch.cat([w.sum().view(1), (w * x).sum(0).view(-1)]))
        n, mean = total[0], (total[1:] / total[0].clamp(min=1)).view_as(self.mean)
        self.merge(n, mean, sum_over_ranks((w * (x - mean).square()).sum(0)))

    @torch.no_grad()
    def merge(self, count: Tensor, mean: Tensor, m2: Tensor) -> None:
        """Take the statistics of another set of rows."""
        total = (self.count + count).clamp(min=1)
        delta = mean - self.mean
        self.mean += delta * (count / total)
        self.m2 += m2 + delta.square() * (self.count * count / total)
        self.count += count
        variance = self.variance
        self.shift.copy_(self.mean)
        self.scale.copy_(torch.where(variance > SMALLEST, variance.rsqrt(), 1.0))

    def normalize(self, x: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation."""
        return (x - self.shift) * self.scale


def is_normalized(spec: Spec, shape: tuple[int, ...]) -> bool:
    """Whether an observation of this shape, once preprocessed, is normalized: vectors of numbers alone."""
    return spec.kind == "continuous" and len(shape) == 1


class ObsNormalizer(nn.Module):
    """Normalizes continuous vectors within ±10; matrices, images, choices and bits pass through."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], specs: Specs) -> None:
        super().__init__()
        names = [name for name, shape in shapes.items() if is_normalized(specs[name], shape)]
        # PyTorch forbids dots in the names of modules, and those of its own methods: hence the prefix
        self.statistics = nn.ModuleDict({_key(name): RunningStatistics(shapes[name]) for name in names})
        self._names = [(name, _key(name)) for name in names]

    def forward(self, observation: Tensors) -> Tensors:
        result = dict(observation)
        for name, key in self._names:
            statistics: Any = self.statistics[key]
            result[name] = statistics.normalize(observation[name]).clamp(-CLIP, CLIP)
        return result

    def numpy(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Do what ``forward`` does, for one observation given as an array."""
        ((_, key),) = self._names
        statistics: Any = self.statistics[key]
        x = (x - statistics.shift.numpy()) * statistics.scale.numpy()
        return np.clip(x, -CLIP, CLIP, out=x)

    def update(self, observation: Tensors, weight: Tensor, sum_over_ranks: SumOverRanks = single_rank) -> None:
        """Take preprocessed observations ``[T, B, F]``; rows of zero ``weight`` ``[T, B]`` do not count."""
        for name, key in self._names:
            statistics: Any = self.statistics[key]
            statistics.update(observation[name], weight, sum_over_ranks)


class RewardScaler(nn.Module):
    """Divides rewards by the standard deviation of the discounted return so far; no mean is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = RunningStatistics(())

    @torch.no_grad()
    def update(self, returns: Tensor, real: Tensor, sum_over_ranks: SumOverRanks = single_rank) -> None:
        """Take the running returns ``[T, B]`` of rows (``running_returns``); padding does not count."""
        self.statistics.update(returns, real, sum_over_ranks)

    def scale(self, reward: Tensor) -> Tensor:
        """Scale rewards of any shape."""
        return reward * self.statistics.scale


def _key(name: str) -> str:
    return f"observation/{name.replace('.', '·')}"
