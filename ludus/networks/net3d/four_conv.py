"""Four convolutions that keep a map."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from ludus.core.arguments import Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize
from ludus.networks.norm import Norm, make_norm

KERNELS = (7, 3, 3, 3)


class FourConv(SubModule):
    """Four convolutions of stride 2, as in adept: ``[F, H, W]`` in, a map ``[channels, H/16, W/16]`` out, rounded up.

    It has no linear layer, so a body such as conv_lstm can use the map. Images may have any size.
    """

    dim = 3

    def __init__(self, input_shape: Shape, config: NetworkConfig, *, channels: Size = 32, norm: Norm = "none") -> None:
        super().__init__(input_shape)
        self.channels = channels
        inputs = (input_shape[0], channels, channels, channels)
        convolutions = [
            initialize(nn.Conv2d(n, channels, kernel, 2, kernel // 2), sqrt(2), config.orthogonal)
            for n, kernel in zip(inputs, KERNELS, strict=True)
        ]
        self.convolutions = nn.ModuleList(convolutions).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norms = nn.ModuleList(make_norm(norm, channels, rank=3) for _ in KERNELS)

    def output_shape(self, dim: int | None = None) -> Shape:
        _, height, width = self.input_shape
        return cast_shape((self.channels, -(-height // 16), -(-width // 16)), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        x = x.contiguous(memory_format=torch.channels_last)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
        return x, state
