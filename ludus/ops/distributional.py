"""Distributional value learning: categorical (C51) and quantile regression (QR-DQN, IQN).

Any leading dimensions; the last one is atoms or quantiles. Targets are detached.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Categorical, with equally spaced atoms.


def c51_support(v_min: float, v_max: float, n: int) -> Tensor:
    """Return n ≥ 2 atoms v_min + i (v_max − v_min) / (n − 1)."""
    return torch.linspace(v_min, v_max, n)


@torch.no_grad()
def c51_project(target_support: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """Project a distribution on ``support`` (Bellemare et al. 2017, eq. 7).

    (ΦTẐ)_i = Σ_j [1 − |clip(z'_j, v_min, v_max) − z_i| / Δz]₀¹ p_j, with atoms z'_j and probabilities p_j ``[..., m]``
    in any order, and ``support`` ``[n]``. Probabilities still sum to 1.
    """
    low, high, last = support[0], support[-1], support.shape[0] - 1
    place = (target_support.clamp(low, high) - low) * (last / (high - low))
    below = place.long().clamp_(0, last - 1)  # v_max goes to the atom above; NaN stays in range
    above = probabilities * (place - below)
    result = probabilities.new_zeros(*above.shape[:-1], last + 1)
    return result.scatter_add_(-1, below, probabilities - above).scatter_add_(-1, below + 1, above)


def c51_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return −Σ_i target_i log p_i, p = softmax(logits) (Bellemare et al. 2017, algorithm 1)."""
    return -(target.detach() * logits.log_softmax(-1)).sum(-1)


# Quantile regression.


def quantile_midpoints(n: int) -> Tensor:
    """Return the quantile midpoints τ̂_i = (2i + 1) / 2n (QR-DQN, Dabney et al. 2018a, lemma 2)."""
    return (torch.arange(n) + 0.5) / n


def quantile_huber(quantiles: Tensor, target: Tensor, taus: Tensor, kappa: float = 1.0) -> Tensor:
    """Return Σ_i mean_j |τ_i − 1{δ_ij < 0}| L_κ(δ_ij), δ_ij = target_j − θ_i (QR-DQN, Dabney et al. 2018a, eq. 10).

    ``quantiles`` θ ``[..., N]`` are at ``taus`` (``[..., N]`` or ``[N]``); ``target`` is ``[..., M]``. L_κ is the Huber
    loss, not divided by κ; κ = 0 means |δ|.

    The gradient is computed in closed form, −mean_j |τ_i − 1{δ_ij < 0}| clip(δ_ij, −κ, κ), so that autograd does not
    have to store the N·M differences.
    """
    with torch.no_grad():
        tau = taus.unsqueeze(-1)
        delta = target.unsqueeze(-2) - quantiles.unsqueeze(-1)  # [..., N, M]
        clipped = delta.clamp(-kappa, kappa) if kappa else delta.sign()
        slope = clipped.clamp(max=0).mul_(1 - 2 * tau).addcmul_(tau, clipped)  # τ·c, and (1−τ)·c where c < 0
        gradient = slope.mean(-1)  # by −θ
        loss = delta.sub_(clipped, alpha=0.5 if kappa else 0).mul_(slope).mean(-1).sum(-1)  # L_κ(δ) = c(δ − ½c)
    return loss - (gradient * (quantiles - quantiles.detach())).sum(-1)


@torch.no_grad()
def truncated_quantiles(quantiles: Tensor, dropped: int) -> Tensor:
    """Return the quantiles of all critics but the largest, ``dropped`` per critic (TQC, Kuznetsov et al. 2020).

    ``quantiles`` are ``[..., E, N]``; the result, in ascending order, is ``[..., E (N − dropped)]``.
    """
    critics, n = quantiles.shape[-2:]
    return quantiles.flatten(-2).sort(-1).values[..., : critics * (n - dropped)]


def quantile_critic_loss(quantiles: Tensor, target: Tensor, taus: Tensor, kappa: float = 1.0) -> Tensor:
    """Return Σ_e mean_i mean_j |τ_i − 1{δ_ij < 0}| L_κ(δ_ij), δ_ij = target_j − θ_ei (TQC, Kuznetsov et al. 2020).

    ``quantiles`` θ of E critics are ``[..., E, N]``, ``target`` is ``[..., M]``; see ``quantile_huber``.
    """
    return quantile_huber(quantiles, target.unsqueeze(-2), taus, kappa).sum(-1) / quantiles.shape[-1]


def cosine_embedding(taus: Tensor, n: int) -> Tensor:
    """Return cos(π i τ), i = 0 … n−1, ``[..., N, n]`` for τ ``[..., N]`` (IQN, Dabney et al. 2018b, eq. 4)."""
    return (taus.unsqueeze(-1) * (math.pi * torch.arange(n, dtype=taus.dtype, device=taus.device))).cos()
