"""The step of augmented random search."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def ars_weights(positive: Tensor, negative: Tensor, top: int) -> Tensor:
    """Return the weight of each direction in a step of ARS ``[N]`` (Mania et al. 2018, algorithm 2, steps 6 and 7).

    (r⁺ − r⁻) / (b σ_R) for the b = ``top`` directions with the largest max(r⁺, r⁻), else 0; r⁺ and r⁻ are the returns
    of the policies moved along a direction and against it. σ_R is the standard deviation of the 2b returns; all weights
    are 0 if it is.
    """
    best = torch.maximum(positive, negative).topk(top).indices
    deviation = torch.cat([positive[best], negative[best]]).std(correction=0)
    scale = torch.where(deviation > 0, 1 / (top * deviation), 0.0)
    return torch.zeros_like(positive).index_copy(0, best, (positive[best] - negative[best]) * scale)
