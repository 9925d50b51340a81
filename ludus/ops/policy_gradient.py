"""Policy and value losses per row, and means over real rows.

Advantages, targets and old values are detached.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ludus.core.moments import Moments, pool_moments
from ludus.core.types import SumOverRanks, single_rank


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return −A_t log π(a_t|s_t) (Williams 1992; Sutton et al. 2000)."""
    return -log_prob * advantage.detach()


def ppo_clip_loss(log_ratio: Tensor, advantage: Tensor, clip: float | Tensor) -> Tensor:
    """Return −min(r_t A_t, clip(r_t, 1−ε, 1+ε) A_t), r_t = exp(``log_ratio``) (Schulman et al. 2017, eq. 7).

    Computed as max(r_t C_t, C_t − ε|C_t|) with C_t = −A_t, which is equivalent and cheaper. A_t may include the row's
    weight.
    """
    cost = advantage.detach().neg()
    return torch.clamp(log_ratio.exp() * cost, min=cost - clip * cost.abs())


def value_loss(value: Tensor, target: Tensor) -> Tensor:
    """Return (V(s_t) − target_t)², without a factor ½."""
    return functional.mse_loss(value, target.detach(), reduction="none")


def clipped_value_loss(value: Tensor, old_value: Tensor, target: Tensor, clip: float | Tensor) -> Tensor:
    """Return the larger of (V − G)² and (V_old + clip(V − V_old, −ε, ε) − G)² (PPO2, Dhariwal et al. 2017)."""
    old_value, target = old_value.detach(), target.detach()
    near = old_value + (value - old_value).clamp(-clip, clip)  # type: ignore[arg-type]
    return torch.maximum((value - target).square(), (near - target).square())


def entropy_loss(entropy: Tensor) -> Tensor:
    """Return −H(π(·|s_t)) (Williams & Peng 1991)."""
    return -entropy


def share_sum(x: Tensor, share: Tensor) -> Tensor:
    """Return Σ share·x, the mean of ``x`` weighted by ``share``."""
    return torch.dot(x.flatten(), share.flatten())


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Return r_t − 1 − log r_t ≥ 0, whose mean over the old policy's actions is KL(old‖new) (Schulman 2020)."""
    return log_ratio.expm1() - log_ratio


def clip_fraction(log_ratio: Tensor, clip: float | Tensor) -> Tensor:
    """Return 1 where |r_t − 1| > ε, else 0."""
    return (log_ratio.expm1().abs() > clip).to(log_ratio.dtype)


def shares(real: Tensor, sum_over_ranks: SumOverRanks = single_rank) -> Tensor:
    """Return real / max(Σ real, 1), the weight of each row in a mean over real rows (``share_sum``)."""
    return real / sum_over_ranks(real.sum()).clamp(min=1)


def shares_of_each(real: Sequence[Tensor], sum_over_ranks: SumOverRanks = single_rank) -> list[Tensor]:
    """Return the ``shares`` of rows in each of several minibatches, by one sum over ranks."""
    counts = sum_over_ranks(torch.stack([x.sum() for x in real])).clamp(min=1)
    return [x / count for x, count in zip(real, counts.unbind(), strict=True)]


def normalize_each(
    values: Sequence[Tensor], real: Sequence[Tensor], eps: float = 1e-8, sum_over_ranks: SumOverRanks = single_rank
) -> tuple[list[Tensor], list[Tensor]]:
    """Normalize each of several minibatches to mean 0 and variance 1 over real rows; return them and their ``shares``.

    (x − μ) / √(σ² + ε²) with the population variance, so a single row, or equal rows, give 0 with a finite gradient.
    """
    moments: list[Sequence[Tensor]] = []
    for x, rows in zip(values, real, strict=True):
        count = rows.sum()
        share = rows / count.clamp(min=1)
        mean = (x * share).sum()
        moments.append((count, mean, ((x - mean).square() * share).sum()))
    if sum_over_ranks is not single_rank:  # else they are those of all ranks
        (pooled,) = pool_moments([Moments.of(*map(torch.stack, zip(*moments, strict=True)))], sum_over_ranks)
        of_all = torch.stack([pooled.n, pooled.mean, pooled.variance], 1).to(values[0].dtype)  # [n, 3]
        moments = [row.unbind() for row in of_all]
    normalized, share_of_each = [], []
    for x, rows, (count, mean, variance) in zip(values, real, moments, strict=True):
        normalized.append((x - mean) * (variance + eps * eps).rsqrt())
        share_of_each.append(rows / count.clamp(min=1))
    return normalized, share_of_each


@torch.no_grad()
def explained_variance(
    value: Tensor, target: Tensor, real: Tensor, sum_over_ranks: SumOverRanks = single_rank
) -> Tensor:
    """Return 1 − Var(target − value) / Var(target) over real rows; 0 if the target is constant.

    1: perfect; 0: no better than a constant; negative: worse. Padding may be NaN.
    """
    share = shares(real).flatten()
    x = torch.where(real > 0, torch.stack([target, target - value]), 0).flatten(1)
    mean = x @ share
    variances = (x - mean.unsqueeze(-1)).square() @ share
    if sum_over_ranks is not single_rank:  # else they are those of all ranks
        (pooled,) = pool_moments([Moments.of(real.sum(), mean, variances)], sum_over_ranks)
        variances = pooled.variance.to(x.dtype)
    variance, unexplained = variances.unbind()
    return torch.where(variance > 0, 1 - unexplained / variance, 0)
