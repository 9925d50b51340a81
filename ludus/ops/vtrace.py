"""V-trace: off-policy value targets and advantages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ludus.ops.scan import linear_scan


class VTrace(NamedTuple):
    """The results of V-trace, each ``[T, B]``, without gradients."""

    target: Tensor  # v_s, the target of V(s_t)
    error: Tensor  # v_s − V(s_t)
    advantage: Tensor  # for the policy gradient, including the importance weight unless pg_rho_bar is None
    rho: Tensor  # min(ρ̄, ρ_t)


@torch.no_grad()
def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    discount: Tensor,
    continues: Tensor,
    value_tm1: Tensor,
    value_t: Tensor,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lambda_: float | Tensor = 1.0,
    pg_rho_bar: float | None = 1.0,
) -> VTrace:
    """Return V-trace targets and advantages (IMPALA, Espeholt et al. 2018, eq. 1 and §4.2).

    With ρ_t = π(a_t|s_t) / μ(a_t|s_t) = exp(``log_ratio``) and D_t = r_t + discount_t V(s_{t+1}) − V(s_t):

    v_t − V(s_t) = min(ρ̄, ρ_t) D_t + discount_t λ min(c̄, ρ_t) (v_{t+1} − V(s_{t+1})),
    advantage_t = min(ρ̄_pg, ρ_t) (r_t + discount_t ((1−λ) V(s_{t+1}) + λ v_{t+1}) − V(s_t)).

    ``discount``, ``continues`` and the values are as in ``ludus.ops.returns``; where ``continues`` is 0, v_{t+1} is
    V(s_{t+1}). With log_ratio = 0 this is GAE(λ) and the λ-return. ρ̄ determines the fixed point, c̄ the speed of
    convergence. With ρ̄_pg None the advantage has no weight, for losses that have the ratio themselves (PPO).
    """
    ratio = log_ratio.exp()
    rho = ratio.clamp(max=rho_bar)
    trace = discount * continues * lambda_
    delta = reward + discount * value_t.masked_fill(discount == 0, 0) - value_tm1
    error = linear_scan(rho * delta, trace * ratio.clamp(max=c_bar))
    later = torch.cat([error[1:], torch.zeros_like(error[:1])]).masked_fill(trace == 0, 0)
    advantage = torch.addcmul(delta, trace, later)
    if pg_rho_bar is not None:
        advantage = ratio.clamp(max=pg_rho_bar) * advantage
    return VTrace(value_tm1 + error, error, advantage, rho)
