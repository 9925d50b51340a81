"""Returns and advantages of a rollout.

Everything is ``[T, B]``. Row t is the transition s_t → s_{t+1}; its ``reward`` is r_t, ``value_tm1`` is V(s_t) and
``value_t`` is V(s_{t+1}). ``discount`` is γ·(1 − terminated), so that a truncation bootstraps and a termination does
not. ``continues`` is 0 where no trace may pass from t to t+1 (terminated, truncated or padding), else 1; row T−1 ends
the rollout and bootstraps like a truncation. Values that a zero discount hides may be NaN.

The results have no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.ops.scan import linear_scan


@torch.no_grad()
def n_step_returns(reward: Tensor, discount: Tensor, continues: Tensor, value_t: Tensor, n: int) -> Tensor:
    """Return n-step returns (Sutton & Barto 2018, eq. 7.1).

    G_t = Σ_{i<k} (Π_{j<i} discount_{t+j}) r_{t+i} + (Π_{j<k} discount_{t+j}) V(s_{t+k}), where k is n,
    or less if ``continues`` is 0 or the rollout ends before.
    """
    if n >= reward.shape[0]:
        return lambda_returns(reward, discount, continues, value_t, 1.0)
    one_step = reward + _bootstrap(discount, value_t)
    stops = (discount * continues)[:-1] == 0
    result = one_step
    for _ in range(n - 1):
        longer = torch.addcmul(reward[:-1], discount[:-1], result[1:])
        result = torch.cat([torch.where(stops, one_step[:-1], longer), one_step[-1:]])
    return result


@torch.no_grad()
def lambda_returns(
    reward: Tensor, discount: Tensor, continues: Tensor, value_t: Tensor, lambda_: float | Tensor
) -> Tensor:
    """Return λ-returns (Sutton & Barto 2018, eq. 12.18).

    G_t = r_t + discount_t · ((1 − λ_t) V(s_{t+1}) + λ_t G_{t+1}), λ_t = λ · continues_t.
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
    """Return generalized advantage estimates (GAE, Schulman et al. 2016, eq. 16).

    A_t = δ_t + discount_t · continues_t · λ · A_{t+1} with δ_t = r_t + discount_t V(s_{t+1}) − V(s_t).
    """
    delta = reward + _bootstrap(discount, value_t) - value_tm1
    return linear_scan(delta, discount * continues * lambda_)


@torch.no_grad()
def running_returns(
    reward: Tensor, ended: Tensor, real: Tensor, gamma: float, carried: Tensor
) -> tuple[Tensor, Tensor]:
    """Return R_t = r_t + γ R_{t−1} ``[T, B]``, for reward scaling, in float64 (Engstrom et al. 2020).

    It restarts after ``ended`` and after padding (not ``real``), whose rewards may be NaN. ``carried`` ``[B]`` is γ R
    before the first step; the second result is that after the last step.
    """
    x = torch.where(real, reward.double(), 0.0)
    x[0] += carried
    decay = (real & ~ended).double() * gamma  # [T, B] from t to t+1
    returns = linear_scan(x.flip(0), torch.cat([decay[:-1].flip(0), torch.zeros_like(decay[:1])])).flip(0)
    return returns, returns[-1] * decay[-1]


def _bootstrap(discount: Tensor, value_t: Tensor) -> Tensor:
    """Return discount · V(s_{t+1}), 0 where the discount is 0, even if the value is NaN."""
    return discount * value_t.masked_fill(discount == 0, 0)
