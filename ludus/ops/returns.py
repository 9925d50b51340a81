"""Returns and advantages of a rollout.

Everything is ``[T, B]``. Row t is the transition s_t → s_{t+1}; its ``reward`` is r_t, ``value_tm1`` is V(s_t) and
``value_t`` is V(s_{t+1}). ``discount`` is γ·(1 − terminated), so that a truncation bootstraps and a termination does
not. ``continues`` is 0 where no trace may pass from t to t+1 (terminated, truncated, or not a real transition), else 1;
row T−1 ends the rollout and bootstraps like a truncation. What a cut or a zero discount hides is not looked at: it may
be NaN.

The results are constants: no gradient flows through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.ops.scan import linear_scan


@torch.no_grad()
def n_step_returns(reward: Tensor, discount: Tensor, continues: Tensor, value_t: Tensor, n: int) -> Tensor:
    """Sum n discounted rewards and bootstrap behind them (Sutton & Barto 2018, eq. 7.1).

    G_t = Σ_{i<k} (Π_{j<i} discount_{t+j}) r_{t+i} + (Π_{j<k} discount_{t+j}) V(s_{t+k}), where k ≤ n is what can be
    reached: fewer than n at a cut or at the end of the rollout.
    """
    if n >= reward.shape[0]:
        return lambda_returns(reward, discount, continues, value_t, 1.0)
    one_step = reward + _bootstrap(discount, value_t)
    cut = (discount * continues)[:-1] == 0
    result = one_step
    for _ in range(n - 1):
        longer = torch.addcmul(reward[:-1], discount[:-1], result[1:])
        result = torch.cat([torch.where(cut, one_step[:-1], longer), one_step[-1:]])
    return result


@torch.no_grad()
def lambda_returns(
    reward: Tensor, discount: Tensor, continues: Tensor, value_t: Tensor, lambda_: float | Tensor
) -> Tensor:
    """Mix the n-step returns of all n with weights (1−λ)λⁿ⁻¹ (Sutton & Barto 2018, eq. 12.18).

    G_t = r_t + discount_t · ((1 − λ_t) V(s_{t+1}) + λ_t G_{t+1}), λ_t = 0 at a cut.
    """
    trace = continues * lambda_
    bootstrap = _bootstrap(discount * (1 - trace), value_t)
    return linear_scan(reward + bootstrap, discount * trace, value_t[-1])


@torch.no_grad()
def gae(
    reward: Tensor,
    discount: Tensor,
    continues: Tensor,
    value_tm1: Tensor,
    value_t: Tensor,
    lambda_: float | Tensor,
) -> Tensor:
    """Estimate advantages (generalized advantage estimation, Schulman et al. 2016, eq. 16).

    A_t = δ_t + discount_t · continues_t · λ · A_{t+1} with δ_t = r_t + discount_t V(s_{t+1}) − V(s_t).
    """
    delta = reward + _bootstrap(discount, value_t) - value_tm1
    return linear_scan(delta, discount * continues * lambda_)


@torch.no_grad()
def running_returns(
    reward: Tensor, ended: Tensor, real: Tensor, gamma: float, carried: Tensor
) -> tuple[Tensor, Tensor]:
    """R_t = r_t + γ R_{t−1}, the discounted sum of a row's rewards so far, in float64 (Engstrom et al. 2020).

    It begins anew after ``ended`` and after padding (not ``real``), whose reward may be anything. ``carried`` ``[B]``
    is γ R before the first step; what is returned beside the returns ``[T, B]`` is that after the last.
    """
    x = torch.where(real, reward.double(), 0.0)
    x[0] += carried
    decay = (real & ~ended).double() * gamma  # [T, B] from t to t+1
    returns = linear_scan(x.flip(0), torch.cat([decay[:-1].flip(0), torch.zeros_like(decay[:1])])).flip(0)
    return returns, returns[-1] * decay[-1]


def _bootstrap(discount: Tensor, value_t: Tensor) -> Tensor:
    """``discount · value_t``, and 0 where the discount is 0, whatever the value is."""
    return discount * value_t.masked_fill(discount == 0, 0)
