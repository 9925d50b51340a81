"""Weight initialization."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Layer = TypeVar("Layer", nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def initialize(layer: Layer, gain: float, orthogonal: bool = True) -> Layer:
    """Set orthogonal weights with ``gain`` and a zero bias; without ``orthogonal``, keep PyTorch's defaults."""
    if orthogonal:
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return layer
