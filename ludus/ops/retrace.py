"""Retrace targets and ACER's policy gradient, for off-policy data."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.ops.scan import linear_scan


@torch.no_grad()
def retrace(
    log_ratio: Tensor,
    reward: Tensor,
    discount: Tensor,
    continues: Tensor,
    q_tm1: Tensor,
    value_t: Tensor,
    lambda_: float | Tensor = 1.0,
    c_bar: float = 1.0,
) -> Tensor:
    """Return Retrace targets Q^ret(s_t, a_t) (Munos et al. 2016, eq. 3; ACER, Wang et al. 2017, eq. 5).

    Everything is ``[T, B]``. With ρ_t = π(a_t|s_t) / μ(a_t|s_t) = exp(``log_ratio``), ``q_tm1`` = Q(s_t, a_t) and
    ``value_t`` = Σ_a π(a|s_{t+1}) Q(s_{t+1}, a):

    Q^ret_t = r_t + discount_t (V(s_{t+1}) + λ min(c̄, ρ_{t+1}) (Q^ret_{t+1} − Q(s_{t+1}, a_{t+1}))).

    ``discount`` and ``continues`` are as in ``ludus.ops.returns``; where the trace stops, the target is
    r_t + discount_t V(s_{t+1}). Unlike V-trace, a trace from t to t+1 uses the ratio at t+1.
    """
    delta = torch.addcmul(reward - q_tm1, discount, value_t.masked_fill(discount == 0, 0))
    passes = discount * continues * lambda_
    ratio = log_ratio.exp().clamp(max=c_bar)
    decay = torch.zeros_like(delta)
    decay[:-1] = passes[:-1] * ratio[1:].masked_fill(passes[:-1] == 0, 0)
    return q_tm1 + linear_scan(delta, decay)


@torch.no_grad()
def acer_weights(
    log_p: Tensor, log_mu: Tensor, action: Tensor, q_ret: Tensor, q: Tensor, value: Tensor, c: float = 10.0
) -> Tensor:
    """Return weights w ``[..., A]`` of log π(a|s_t) in ACER's policy gradient (Wang et al. 2017, eq. 9).

    ĝ = min(c, ρ_t) (Q^ret_t − V) ∇log π(a_t|s_t) + Σ_a [1 − c/ρ_t(a)]₊ π(a|s_t) (Q(s_t, a) − V) ∇log π(a|s_t)
      = Σ_a w_a ∇log π(a|s_t).

    The second term corrects the bias of truncating the ratio ρ_t(a) = π(a|s_t) / μ(a|s_t). ``log_p`` and ``log_mu``
    (of the policy that acted) are log-probabilities ``[..., A]``, finite also for masked actions (see ``mask_logits``);
    ``q`` is ``[..., A]``, the rest ``[...]``. Where π is 0, Q may be NaN.
    """
    p, chosen = log_p.exp(), action.unsqueeze(-1)
    correction = (1 - c * (log_mu - log_p).exp()).clamp_(min=0)
    advantage = (q - value.unsqueeze(-1)).masked_fill_(p == 0, 0)
    ratio = (log_p - log_mu).gather(-1, chosen).exp()
    return (correction * p * advantage).scatter_add_(-1, chosen, ratio.clamp_(max=c) * (q_ret - value).unsqueeze(-1))


def acer_policy_loss(log_p: Tensor, weights: Tensor) -> Tensor:
    """Return −Σ_a w_a log π(a|s_t), whose gradient is −ĝ of ``acer_weights``."""
    return -(weights.detach() * log_p).sum(-1)
