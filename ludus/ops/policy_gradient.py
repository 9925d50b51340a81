"""Losses of policies and values, one number per row, and the means over real rows that make them one number.

No gradient reaches an advantage, a target or an old value, whatever graph it comes with.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ludus.core.types import SumOverRanks, single_rank


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return −A_t log π(a_t|s_t) (Williams 1992; Sutton et al. 2000)."""
    return -log_prob * advantage.detach()


def ppo_clip_loss(log_ratio: Tensor, advantage: Tensor, clip: float | Tensor) -> Tensor:
    """Return −min(r_t A_t, clip(r_t, 1−ε, 1+ε) A_t), r_t = exp(``log_ratio``) (Schulman et al. 2017, eq. 7).

    Written as max(r_t C_t, C_t − ε|C_t|) with the cost C_t = −A_t, which is the same for either sign and has a constant
    on one side. A weight of the row may be in A_t already.
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
    """Return −H(π(·|s_t)): lowering it keeps the policy random (Williams & Peng 1991)."""
    return -entropy


def share_sum(x: Tensor, share: Tensor) -> Tensor:
    """Return Σ share·x: the mean of ``x`` over the rows of which ``share`` says what each counts."""
    return torch.dot(x.flatten(), share.flatten())


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Return r_t − 1 − log r_t ≥ 0, whose mean over the old policy's actions is KL(old‖new) (Schulman 2020)."""
    return log_ratio.expm1() - log_ratio


def clip_fraction(log_ratio: Tensor, clip: float | Tensor) -> Tensor:
    """Return 1 where |r_t − 1| > ε, else 0."""
    return (log_ratio.expm1().abs() > clip).to(log_ratio.dtype)


def shares(real: Tensor, weight: Tensor | None = None, sum_over_ranks: SumOverRanks = single_rank) -> Tensor:
    """Return real · weight / max(Σ real, 1), with which a mean over real rows is ``share_sum``.

    ``weight``: importance weights; those below 1 make the mean smaller. Padding must hold a finite number.
    """
    return (real if weight is None else real * weight) / sum_over_ranks(real.sum()).clamp(min=1)


def normalize(x: Tensor, share: Tensor, eps: float = 1e-8, sum_over_ranks: SumOverRanks = single_rank) -> Tensor:
    """Shift and scale ``x`` to mean 0 and variance 1 over the rows that have a share; the others hold what they may.

    (x − μ) / √(σ² + ε²) with the variance of a population: a single row, or rows that are all equal, give 0, with
    a finite gradient.
    """
    centred = x - sum_over_ranks((x * share).sum())
    variance = sum_over_ranks((centred.square() * share).sum())
    return centred * (variance + eps * eps).rsqrt()


@torch.no_grad()
def explained_variance(
    value: Tensor, target: Tensor, real: Tensor, sum_over_ranks: SumOverRanks = single_rank
) -> Tensor:
    """Return 1 − Var(target − value) / Var(target) over real rows, and 0 where the target has no variance.

    1: the values are perfect; 0: as good as a constant; below 0: worse. Padding may hold anything.
    """
    share = shares(real, sum_over_ranks=sum_over_ranks).flatten()
    x = torch.where(real > 0, torch.stack([target, target - value]), 0).flatten(1)
    centred = x - sum_over_ranks(x @ share).unsqueeze(-1)
    variance, unexplained = sum_over_ranks(centred.square() @ share).unbind()
    return torch.where(variance > 0, 1 - unexplained / variance, 0)
