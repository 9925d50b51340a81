"""ACER's trust region around an average policy.

Gradients are by the parameters φ ``[..., K]`` of the action distribution, so that the projection needs no second
backward pass through the network.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def trust_region_gradient(g: Tensor, k: Tensor, delta: float) -> Tensor:
    """Return the projection z of g on k·z ≤ δ (Wang et al. 2017, eq. 11 and 12).

    z = g − max(0, (k·g − δ) / ‖k‖²) k, per row; ``g`` is the policy gradient (ascent), ``k`` the gradient of the KL.
    """
    excess = (k * g).sum(-1, keepdim=True) - delta
    length = k.square().sum(-1, keepdim=True).clamp_(min=torch.finfo(k.dtype).tiny)
    return torch.addcmul(g, (excess / length).clamp_(min=0), k, value=-1)


def trust_region_loss(statistics: Tensor, g: Tensor, k: Tensor, delta: float) -> Tensor:
    """Return −z·φ, a surrogate with the gradient −z of ``trust_region_gradient``; its value has no meaning."""
    return -(trust_region_gradient(g, k, delta) * statistics).sum(-1)


@torch.no_grad()
def kl_gradient_logits(average_logits: Tensor, logits: Tensor) -> Tensor:
    """Return the gradient of KL(average‖new) by the new policy's logits: π − π_average."""
    return logits.softmax(-1) - average_logits.softmax(-1)


@torch.no_grad()
def policy_gradient_logits(weights: Tensor, logits: Tensor, entropy_coef: float = 0.0) -> Tensor:
    """Return the gradient of Σ_a w_a log π(a) + β H(π) by the logits ``[..., A]``: w − π Σw − βπ(log π + H).

    ``weights`` are constants: those of ``ludus.ops.retrace.acer_weights``, or an advantage at the action taken.
    """
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    g = torch.addcmul(weights, p, weights.sum(-1, keepdim=True), value=-1)
    if entropy_coef:
        entropy = -(p * log_p).sum(-1, keepdim=True)
        g.addcmul_(p, log_p + entropy, value=-entropy_coef)
    return g
