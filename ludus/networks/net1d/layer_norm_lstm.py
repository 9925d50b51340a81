"""LSTM with layer normalization."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.core.arguments import Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize
from ludus.networks.net1d.recurrent import RecurrentPiece


class LayerNormLSTM(RecurrentPiece):
    """An LSTM of ``size`` units with layer norms of its gates and its cell (Ba et al. 2016).

    No fused kernel has these norms, so that a sequence is a loop over T; only the input's part of the gates is computed
    at once. An LSTM without norms is several times as fast.
    """

    states = ("h", "c")

    def __init__(self, input_shape: Shape, config: NetworkConfig, *, size: Size | None = None) -> None:
        super().__init__(input_shape, config, size)
        self.input = initialize(nn.Linear(input_shape[0], 4 * self.size, bias=False), 1.0, config.orthogonal)
        self.hidden = initialize(nn.Linear(self.size, 4 * self.size, bias=False), 1.0, config.orthogonal)
        self.input_norm, self.hidden_norm = nn.LayerNorm(4 * self.size), nn.LayerNorm(4 * self.size)
        self.cell_norm = nn.LayerNorm(self.size)
        self.input_norm.bias.data[self.size : 2 * self.size] = 1.0  # forget gates: the initial LSTM keeps its state

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        h, c, outputs = state["h"], state["c"], []
        for gates, reset in zip(self.input_norm(self.input(x)), first.unsqueeze(-1), strict=True):
            h, c = h.masked_fill(reset, 0), c.masked_fill(reset, 0)
            i, f, g, o = (gates + self.hidden_norm(self.hidden(h))).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(self.cell_norm(c))
            outputs.append(h)
        return torch.stack(outputs), HiddenState(h=h, c=c)
