"""The convolutions of the FullyConv agent of SC2LE (Vinyals et al. 2017), which keep height and width."""

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


class SC2LEEncoder(SubModule):
    """The encoder of SC2LE (Vinyals et al. 2017): convolutions 5×5 with 16 and 3×3 with 32 channels keep H × W.

    ``[F, H, W]`` in, ``[channels, H, W]`` out; the first convolution has half the channels.
    """

    dim = 3

    def __init__(self, input_shape: Shape, config: NetworkConfig, *, channels: Size = 32) -> None:
        super().__init__(input_shape)
        self.channels, hidden = channels, -(-channels // 2)
        self.hidden = initialize(nn.Conv2d(input_shape[0], hidden, 5, padding=2), sqrt(2), config.orthogonal)
        self.output = initialize(nn.Conv2d(hidden, channels, 3, padding=1), sqrt(2), config.orthogonal)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.channels, *self.input_shape[1:]), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        return torch.relu(self.output(torch.relu(self.hidden(x)))), state


class SC2LEDecoder(SubModule):
    """A head for spatial policies, after SC2LE (Vinyals et al. 2017): a 3×3 convolution that keeps H × W.

    ``[F, H, W]`` in, ``[channels, H, W]`` out. The output layer that follows is the 1×1 convolution of the paper, which
    gives one logit per pixel.
    """

    dim = 3

    def __init__(self, input_shape: Shape, config: NetworkConfig, *, channels: Size = 32) -> None:
        super().__init__(input_shape)
        self.channels = channels
        self.convolution = initialize(nn.Conv2d(input_shape[0], channels, 3, padding=1), sqrt(2), config.orthogonal)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.channels, *self.input_shape[1:]), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        return torch.relu(self.convolution(x)), state
