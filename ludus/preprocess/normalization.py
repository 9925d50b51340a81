"""Running statistics in float64 and normalizers; they change only in ``update``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ludus.core.moments import Moments, pool_moments
from ludus.core.spec import Spec, Specs
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.preprocess.observation import ObsPreprocessor, clear_padding

MIN_VARIANCE = 1e-12  # values with a smaller variance are not scaled: their first change would become huge
CLIP = 10.0  # bound of normalized observations


class RunningStatistics(nn.Module):
    """Mean and variance of all rows so far (parallel algorithm, Chan et al. 1979)."""

    count: Tensor
    mean: Tensor
    m2: Tensor  # the sum of squared deviations
    shift: Tensor
    scale: Tensor
    frozen = False  # whether ``update`` does nothing

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))  # mean and 1/std in float32
        self.register_buffer("scale", torch.ones(shape))

    @property
    def variance(self) -> Tensor:
        """The population variance; 0 without data."""
        return self.m2 / self.count.clamp(min=1)

    def update(self, x: Tensor, weight: Tensor, sum_over_ranks: SumOverRanks = single_rank) -> None:
        """Add rows ``x`` ``[…, *shape]``; those with ``weight`` ``[…]`` 0 are ignored and may be NaN."""
        update_statistics([(self, x, weight)], sum_over_ranks)

    def moments(self, x: Tensor, weight: Tensor) -> Moments:
        """Return number, sum and squared deviations of rows, given as for ``update``."""
        x = x.reshape(-1, *self.mean.shape).double()
        w = weight.reshape(-1, *[1] * self.mean.dim()).double()
        x = torch.where(w > 0, x, 0.0)
        n, total = w.sum(), (w * x).sum(0)
        return Moments(n, total, (w * (x - total / n.clamp(min=1)).square()).sum(0))

    @torch.no_grad()
    def merge(self, count: Tensor, mean: Tensor, m2: Tensor) -> None:
        """Add the statistics of another set of rows."""
        total = (self.count + count).clamp(min=1)
        delta = mean - self.mean
        self.mean += delta * (count / total)
        self.m2 += m2 + delta.square() * (self.count * count / total)
        self.count += count
        variance = self.variance
        self.shift.copy_(self.mean)
        self.scale.copy_(torch.where(variance > MIN_VARIANCE, variance.rsqrt(), 1.0))

    def normalize(self, x: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation."""
        return (x - self.shift) * self.scale


StatisticsRows = tuple[RunningStatistics, Tensor, Tensor]  # statistics, new rows and their weights


@torch.no_grad()
def update_statistics(rows: Iterable[StatisticsRows], sum_over_ranks: SumOverRanks = single_rank) -> None:
    """Update several statistics by one sum over ranks."""
    updated = [(statistics, statistics.moments(x, w)) for statistics, x, w in rows if not statistics.frozen]
    if updated:
        pooled = pool_moments([moments for _, moments in updated], sum_over_ranks)
        for (statistics, _), moments in zip(updated, pooled, strict=True):
            statistics.merge(moments.n, moments.mean, moments.squares)


def is_normalized(spec: Spec) -> bool:
    """Return whether a preprocessed observation is normalized: numbers that are a vector or a list of entities."""
    return spec.kind == "continuous" and (len(spec.shape) == 1 or spec.axes == "entities")


def unused_normalizer(config: Any, observation: Specs) -> Iterator[tuple[str, str]]:
    """Yield ``normalize_observation`` where there is nothing to normalize."""
    numbers = any(map(is_normalized, ObsPreprocessor(observation).outputs.values()))
    if config.normalize_observation and not numbers:
        yield "normalize_observation", "the environment has no vector or list of numbers among its observations"


class ObsNormalizer(nn.Module):
    """Normalizes vectors and entity lists and clips them to ±10; other observations are unchanged.

    A list ``[F, S]`` has one mean and variance per feature, over all entities but padding, which stays zero. ``specs``
    are those of preprocessed observations.
    """

    def __init__(self, specs: Specs) -> None:
        super().__init__()
        shapes = {name: spec.shape for name, spec in specs.items() if is_normalized(spec)}
        self.statistics = nn.ModuleDict({_key(name): RunningStatistics(shape[:1]) for name, shape in shapes.items()})
        masks = {spec.masks: name for name, spec in specs.items() if spec.masks is not None}
        self._vectors = [(name, _key(name)) for name, shape in shapes.items() if len(shape) == 1]
        self._lists = [(name, _key(name), masks.get(name)) for name, shape in shapes.items() if len(shape) == 2]
        self.names = list(shapes)  # of the observations that are normalized

    def forward(self, observation: Tensors) -> Tensors:
        result = dict(observation)
        for name, key in self._vectors:
            statistics: Any = self.statistics[key]
            result[name] = statistics.normalize(observation[name]).clamp(-CLIP, CLIP)
        for name, key, mask in self._lists:
            statistics = self.statistics[key]
            x = statistics.normalize(observation[name].mT).mT.clamp(-CLIP, CLIP)
            result[name] = x if mask is None else clear_padding(x, observation[mask])
        return result

    def numpy(self, x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        """Normalize an array as ``forward`` does the vector ``name``."""
        statistics: Any = self.statistics[_key(name)]
        x = (x - statistics.shift.numpy()) * statistics.scale.numpy()
        return np.clip(x, -CLIP, CLIP, out=x)

    def update(self, observation: Tensors, weight: Tensor, sum_over_ranks: SumOverRanks = single_rank) -> None:
        """Update with preprocessed observations ``[T, B, …]``; rows with ``weight`` ``[T, B]`` 0 are ignored."""
        update_statistics(self.rows(observation, weight), sum_over_ranks)

    def rows(self, observation: Tensors, weight: Tensor) -> list[StatisticsRows]:
        """Return what ``update`` updates, with which rows."""
        found: list[tuple[Any, Tensor, Tensor]] = [
            (self.statistics[key], observation[name], weight) for name, key in self._vectors
        ]
        for name, key, mask in self._lists:
            x = observation[name].mT  # [T, B, S, F]
            each = weight.unsqueeze(-1) if mask is None else weight.unsqueeze(-1) * observation[mask]
            found.append((self.statistics[key], x, each.expand(x.shape[:-1])))
        return found


class RewardScaler(nn.Module):
    """Divides rewards by the standard deviation of the running discounted return, without subtracting the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = RunningStatistics(())

    @torch.no_grad()
    def update(self, returns: Tensor, real: Tensor, sum_over_ranks: SumOverRanks = single_rank) -> None:
        """Update with running returns ``[T, B]`` (``ops.returns.running_returns``); padding is ignored."""
        self.statistics.update(returns, real, sum_over_ranks)

    def scale(self, reward: Tensor) -> Tensor:
        """Scale rewards of any shape."""
        return reward * self.statistics.scale


def _key(name: str) -> str:
    """Return a valid submodule name: without dots, and with a prefix that no method of nn.Module has."""
    return f"observation/{name.replace('.', '·')}"
