"""A convolutional network for images that are too small for nature_cnn."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize

FEATURES = (16, 32, 32)
WIDTH = 256
FULL_SIZE = 16  # up to this side, the first convolution has stride 1


class SmallCNN(SubModule):
    """Three 3×3 convolutions and a linear layer of 256: images ``[F, H, W]`` of any size in, vectors out.

    The second and third convolution halve each side, and so does the first if a side is longer than 16. Images are
    padded by one pixel, so that every pixel is used and even 1×1 images work.
    """

    dim = 3

    def __init__(self, input_shape: Shape, config: NetworkConfig) -> None:
        super().__init__(input_shape)
        features, height, width = input_shape
        convolutions = []
        for out, stride in zip(FEATURES, (1 if max(height, width) <= FULL_SIZE else 2, 2, 2), strict=True):
            layer = nn.Conv2d(features, out, 3, stride, padding=1)
            convolutions.append(initialize(layer, sqrt(2), config.orthogonal))
            features, height, width = out, -(-height // stride), -(-width // stride)
        self.convolutions = nn.ModuleList(convolutions).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.linear = initialize(nn.Linear(features * height * width, WIDTH), sqrt(2), config.orthogonal)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((WIDTH,), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        x = x.contiguous(memory_format=torch.channels_last)
        for convolution in self.convolutions:
            x = torch.relu(convolution(x))
        x = x.permute(0, 2, 3, 1).flatten(1)  # already in this order in memory, so no copy
        return torch.relu(self.linear(x)), state
