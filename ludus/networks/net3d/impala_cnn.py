"""The deep residual network of IMPALA."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.arguments import Size, Sizes
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize


class ImpalaCNN(SubModule):
    """The residual network of IMPALA (Espeholt et al. 2018): images ``[F, H, W]`` in, vectors of ``size`` out.

    For each of ``channels``: a 3×3 convolution, a max pooling that halves height and width, and two residual blocks of
    two 3×3 convolutions. A linear layer follows. Images may have any size; 15 layers with the default channels.
    """

    dim = 3

    def __init__(
        self, input_shape: Shape, config: NetworkConfig, *, channels: Sizes = (16, 32, 32), size: Size = 256
    ) -> None:
        super().__init__(input_shape)
        features, height, width = input_shape
        sections = []
        for out in channels:
            sections.append(_Section(features, out, config))
            features, height, width = out, -(-height // 2), -(-width // 2)
        self.sections = nn.ModuleList(sections).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.linear = initialize(nn.Linear(features * height * width, size), sqrt(2), config.orthogonal)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.linear.out_features,), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        x = x.contiguous(memory_format=torch.channels_last)
        for section in self.sections:
            x = section(x)
        x = torch.relu(x).permute(0, 2, 3, 1).flatten(1)  # already in this order in memory, so no copy
        return torch.relu(self.linear(x)), state


class _Section(nn.Module):
    """A convolution, a max pooling with stride 2, and two residual blocks."""

    def __init__(self, features: int, channels: int, config: NetworkConfig) -> None:
        super().__init__()
        self.input = _convolution(features, channels, config)
        self.blocks = nn.ModuleList(_Block(channels, config) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.input(x), 3, 2, padding=1)
        for block in self.blocks:
            x = block(x)
        return x


class _Block(nn.Module):
    def __init__(self, channels: int, config: NetworkConfig) -> None:
        super().__init__()
        self.hidden, self.output = (_convolution(channels, channels, config) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.output(torch.relu(self.hidden(torch.relu(x))))
        return y


def _convolution(features: int, channels: int, config: NetworkConfig) -> nn.Conv2d:
    return initialize(nn.Conv2d(features, channels, 3, padding=1), sqrt(2), config.orthogonal)
