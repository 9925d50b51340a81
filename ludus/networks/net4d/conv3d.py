"""Convolutions over volumes and clips."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from ludus.core.arguments import Size, Sizes
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize


class Conv3D(SubModule):
    """Convolutions 3×3×3 of stride 2 and a linear layer: volumes or clips ``[F, D, H, W]`` in, vectors of ``size`` out.

    Each side is halved and rounded up, so volumes may have any size.
    """

    dim = 4

    def __init__(
        self, input_shape: Shape, config: NetworkConfig, *, channels: Sizes = (16, 32, 32), size: Size = 256
    ) -> None:
        super().__init__(input_shape)
        features, *sides = input_shape
        convolutions = []
        for out in channels:
            convolutions.append(initialize(nn.Conv3d(features, out, 3, 2, padding=1), sqrt(2), config.orthogonal))
            features, sides = out, [-(-side // 2) for side in sides]
        self.convolutions = nn.ModuleList(convolutions)
        inputs = features * sides[0] * sides[1] * sides[2]
        self.linear = initialize(nn.Linear(inputs, size), sqrt(2), config.orthogonal)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.linear.out_features,), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        for convolution in self.convolutions:
            x = torch.relu(convolution(x))
        return torch.relu(self.linear(x.flatten(1))), state
