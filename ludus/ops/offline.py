"""Losses of offline reinforcement learning: TD3+BC, IQL and CQL.

Any leading dimensions; A is the number of actions, E of critics, K of action elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ludus.ops.distributions import mask_logits
from ludus.ops.q_learning import gather_action, hysteretic_weight


def td3_bc_actor_loss(q: Tensor, action: Tensor, recorded: Tensor, alpha: float, mean_size: Tensor) -> Tensor:
    """Return −λQ(s, π(s)) + ‖π(s) − a‖² / K with λ = α / mean|Q| (TD3+BC, Fujimoto & Gu 2021, eq. 3 to 5).

    ``q`` is ``[...]``, π(s) and the recorded a are ``[..., K]``; ``mean_size`` is the mean of |Q| over the batch, which
    is detached.
    """
    weight = alpha / mean_size.detach().clamp(min=1e-8)
    return (action - recorded).square().mean(-1) - weight * q


def expectile_loss(error: Tensor, expectile: float) -> Tensor:
    """Return |τ − 1(u < 0)|·u² for u = Q(s, a) − V(s) (IQL, Kostrikov et al. 2022, eq. 5); τ = ½ is half the square."""
    return hysteretic_weight(error, increase=expectile, decrease=1 - expectile) * error.square()


@torch.no_grad()
def advantage_weight(advantage: Tensor, temperature: float, largest: float) -> Tensor:
    """Return exp(β(Q(s, a) − V(s))), at most ``largest`` (IQL, eq. 7; AWR, Peng et al. 2019, with their clipping)."""
    return (temperature * advantage).clamp(max=math.log(largest)).exp()


def conservative_loss(q: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return log Σ_a exp Q(s, a) − Q(s, a_t) for q ``[..., A]`` (CQL(H), Kumar et al. 2020, eq. 4).

    The sum is over valid actions: those where ``mask`` ``[..., A]`` is not 0.
    """
    return (q if mask is None else mask_logits(q, mask)).logsumexp(-1) - gather_action(q, action)


def sampled_logsumexp(q: Tensor, log_density: Tensor) -> Tensor:
    """Return log (1/M) Σ_i exp(Q(s, a_i)) / μ_i(a_i), an estimate of log ∫ exp Q(s, a) da (CQL, appendix F).

    ``q`` is ``[M, ...]`` for M actions, of which action i was drawn with the density μ_i; ``log_density`` broadcasts
    to it.
    """
    return (q - log_density).logsumexp(0) - math.log(len(q))
