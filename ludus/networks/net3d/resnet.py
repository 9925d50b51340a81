"""Residual networks of 18 and 50 layers."""

from __future__ import annotations

from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize
from ludus.networks.norm import make_norm

ResNetNorm = Literal["batch", "group", "none"]


class ResNet18(SubModule):
    """A residual network of 18 layers (He et al. 2016): images ``[F, H, W]`` of any size in, vectors of 512 out.

    The norm is a group norm by default, since a batch norm mixes rows of a batch and acts differently while acting. The
    last layer of each block is initially zero, so that a network without norms is stable too.
    """

    dim = 3
    blocks: tuple[int, int, int, int] = (2, 2, 2, 2)  # blocks with 64, 128, 256 and 512 channels
    bottleneck = False

    def __init__(self, input_shape: Shape, config: NetworkConfig, *, norm: ResNetNorm = "group") -> None:
        super().__init__(input_shape)
        self.input = _Convolution(input_shape[0], 64, 7, 2, norm, config)
        blocks: list[nn.Module] = []
        features = 64
        for section, count in enumerate(self.blocks):
            channels = 64 * 2**section
            for i in range(count):
                blocks.append(_Block(features, channels, 2 if section and not i else 1, self.bottleneck, norm, config))
                features = channels * (4 if self.bottleneck else 1)
        self.sections = nn.ModuleList(blocks)
        self._size = features
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self._size,), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        x = torch.relu(self.input(x.contiguous(memory_format=torch.channels_last)))
        x = functional.max_pool2d(x, 3, 2, padding=1)
        for block in self.sections:
            x = block(x)
        return x.mean((2, 3)), state


class ResNet50(ResNet18):
    """A residual network of 50 layers (He et al. 2016): images ``[F, H, W]`` of any size in, vectors of 2048 out."""

    blocks = (3, 4, 6, 3)
    bottleneck = True


class _Convolution(nn.Module):
    """A convolution and a norm."""

    def __init__(
        self, features: int, channels: int, kernel: int, stride: int, norm: ResNetNorm, config: NetworkConfig
    ) -> None:
        super().__init__()
        layer = nn.Conv2d(features, channels, kernel, stride, kernel // 2, bias=norm == "none")
        self.convolution, self.norm = initialize(layer, sqrt(2), config.orthogonal), make_norm(norm, channels, rank=3)

    def set_zero(self) -> None:
        """Set the last weights to zero, those of the norm if there is one, so that the output is 0."""
        layer: Any = self.convolution if isinstance(self.norm, nn.Identity) else self.norm
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.convolution(x))
        return y


class _Block(nn.Module):
    """x + convolutions of x: two of 3×3, or with ``bottleneck`` 1×1, 3×3 and 1×1 with four times the channels."""

    def __init__(
        self, features: int, channels: int, stride: int, bottleneck: bool, norm: ResNetNorm, config: NetworkConfig
    ) -> None:
        super().__init__()
        out = 4 * channels if bottleneck else channels
        layers = (  # features, channels, kernel, stride
            [(features, channels, 1, 1), (channels, channels, 3, stride), (channels, out, 1, 1)]
            if bottleneck
            else [(features, channels, 3, stride), (channels, out, 3, 1)]
        )
        *hidden, last = [_Convolution(*layer, norm, config) for layer in layers]
        self.hidden, self.last = nn.ModuleList(hidden), last
        last.set_zero()
        changes = stride > 1 or features != out
        self.shortcut = _Convolution(features, out, 1, stride, norm, config) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.hidden:
            y = torch.relu(layer(y))
        return torch.relu(self.last(y) + self.shortcut(x))
