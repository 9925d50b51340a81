"""Mixing of the agents' values into the value of the team."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def monotonic_mixing(q: Tensor, weight: Tensor, bias: Tensor, last_weight: Tensor, last_bias: Tensor) -> Tensor:
    """Return Q_tot = elu(q·|W₁| + b₁)·|w₂| + b₂ ``[...]`` of values ``q`` ``[..., N]`` (QMIX, Rashid et al. 2018, §4).

    It does not decrease in any value. The parameters of the mixing network are functions of the state: ``weight``
    ``[..., N, H]``, ``bias`` and ``last_weight`` ``[..., H]``, ``last_bias`` ``[...]``.
    """
    hidden = functional.elu((q.unsqueeze(-1) * weight.abs()).sum(-2) + bias)
    return (hidden * last_weight.abs()).sum(-1) + last_bias
