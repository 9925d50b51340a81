"""LSTM over images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.core.arguments import Size
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize


class ConvLSTM(SubModule):
    """An LSTM with convolutions as weights (Shi et al. 2015): ``[F, H, W]`` in, ``[channels, H, W]`` out.

    The input's part of the gates is computed for the whole sequence at once, the state's part in a loop over T. The
    states ``h`` and ``c``, ``[B, channels, H, W]``, are reset by each episode.
    """

    dim = 3
    recurrent = True

    def __init__(self, input_shape: Shape, config: NetworkConfig, *, channels: Size = 32, kernel: Size = 3) -> None:
        super().__init__(input_shape)
        if kernel % 2 == 0:
            raise UserError(f"kernel is {kernel}; it must be odd, so that height and width are kept.")
        self.channels = channels
        padding = kernel // 2
        gates = 4 * channels
        self.input = initialize(nn.Conv2d(input_shape[0], gates, kernel, padding=padding), 1.0, config.orthogonal)
        self.hidden = initialize(
            nn.Conv2d(channels, gates, kernel, padding=padding, bias=False), 1.0, config.orthogonal
        )
        assert self.input.bias is not None
        self.input.bias.data[channels : 2 * channels] = 1.0  # forget gates: the initial LSTM keeps its state

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.channels, *self.input_shape[1:]), dim)

    def initial_state(self, batch: int) -> HiddenState:
        zeros = self.hidden.weight.new_zeros(batch, self.channels, *self.input_shape[1:])
        return HiddenState(h=zeros, c=zeros.clone())

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        h, c, outputs = state["h"], state["c"], []
        inputs = self.input(x.flatten(0, 1)).unflatten(0, first.shape)
        for gates, reset in zip(inputs, first.view(*first.shape, 1, 1, 1), strict=True):
            h, c = h.masked_fill(reset, 0), c.masked_fill(reset, 0)
            i, f, g, o = (gates + self.hidden(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), HiddenState(h=h, c=c)
