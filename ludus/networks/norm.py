"""Normalization layers by name."""

from __future__ import annotations

from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn

Norm = Literal["none", "layer", "batch", "batch_renorm", "group"]

GROUP_SIZE = 16  # features per group of a group norm, where their number allows
MIN_GROUP_SIZE = 4  # normalizing fewer numbers would lose most of what they say
RENORM_WARMUP = 100_000  # updates in which a batch renorm is a batch norm
MAX_SCALE, MAX_SHIFT = 3.0, 5.0  # bounds of the corrections of a batch renorm


def make_norm(norm: Norm, features: int, rank: int) -> nn.Module:
    """Make a normalization of ``[N, features, …]`` with ``rank`` dimensions per row.

    A layer norm of maps normalizes each row over features and space, as a group norm of one group.
    """
    if norm == "batch":
        batch_norm: Any = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[rank]
        return batch_norm(features)  # type: ignore[no-any-return]
    if norm == "batch_renorm":
        return BatchRenorm(features)
    if norm == "layer":
        return nn.LayerNorm(features) if rank == 1 else nn.GroupNorm(1, features)
    if norm == "group":
        size = gcd(features, GROUP_SIZE)
        return nn.GroupNorm(features // size if size >= MIN_GROUP_SIZE else 1, features)
    return nn.Identity()


def batch_norm_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running means and variances of the batch norms and renorms within a module."""
    found: list[Tensor] = []
    for part in module.modules():
        if isinstance(part, BatchRenorm):
            found += [part.mean, part.variance]
        elif isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
            found += [part.running_mean, part.running_var]  # type: ignore[list-item]
    return found


class BatchRenorm(nn.Module):
    """Batch renormalization of ``[N, features, …]`` (Ioffe 2017), which trains with nearly what it evaluates with.

    In training, (x − μ_B)/σ_B · r + d, with r = σ_B/σ and d = (μ_B − μ)/σ clipped and without gradient, where μ and σ
    are running averages; with r = 1 and d = 0, a batch norm, in the first ``RENORM_WARMUP`` updates. In evaluation,
    (x − μ)/σ.
    """

    depends_on_training_mode = normalizes = True
    mean: Tensor
    variance: Tensor
    steps: Tensor

    def __init__(self, features: int, momentum: float = 0.01, eps: float = 1e-3) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.ones(features))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        if not self.training:
            scale = self.weight * (self.variance + self.eps).rsqrt()
            return (x - self.mean.view(shape)) * scale.view(shape) + self.bias.view(shape)
        others = [0, *range(2, x.dim())]
        variance, mean = torch.var_mean(x, others, correction=0)
        with torch.no_grad():
            std, running = (variance + self.eps).sqrt(), (self.variance + self.eps).sqrt()
            warm = self.steps < RENORM_WARMUP
            r = torch.where(warm, 1.0, (std / running).clamp(1 / MAX_SCALE, MAX_SCALE))
            d = torch.where(warm, 0.0, ((mean - self.mean) / running).clamp(-MAX_SHIFT, MAX_SHIFT))
            self.mean.lerp_(mean, self.momentum)
            self.variance.lerp_(variance, self.momentum)
            self.steps.add_(1)
        scale = self.weight * r * (variance + self.eps).rsqrt()
        shift = self.weight * d + self.bias
        return (x - mean.view(shape)) * scale.view(shape) + shift.view(shape)
