"""LSTM over vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.arguments import Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape
from ludus.networks.config import NetworkConfig
from ludus.networks.net1d.recurrent import RecurrentPiece
from ludus.networks.net1d.resets import GATE_INPUT, Resets


class LSTM(RecurrentPiece):
    """LSTM layers of ``size`` units (Hochreiter & Schmidhuber 1997), with a hidden state that each episode resets.

    A sequence is one fused call per layer, not a loop over T: an inserted step before each ``first`` closes the input
    and forget gates and so sets ``c`` and ``h`` to exactly zero; padding steps keep ``c``.
    """

    states = ("h", "c")

    def __init__(
        self, input_shape: Shape, config: NetworkConfig, *, size: Size | None = None, layers: Size = 1
    ) -> None:
        super().__init__(input_shape, config, size, layers)
        cells = [nn.LSTMCell(n, self.size) for n in self.input_sizes]
        if config.orthogonal:
            for cell in cells:
                initialize_gates(cell, gates=4)
                cell.bias_ih.data[self.size : 2 * self.size] = 1.0  # forget gates: the initial LSTM keeps its state
        self.cells = nn.ModuleList(cells)
        gates = torch.zeros(4 * self.size, 2)  # weights of two extra inputs, to the input gates and the forget gates
        gates[: self.size, 0] = -GATE_INPUT
        gates[self.size : 2 * self.size, 1] = GATE_INPUT
        self.gates: Tensor
        self.register_buffer("gates", gates, persistent=False)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        start = state.reset(first[0])
        if x.shape[0] > 1:
            return self._sequence(x, start, Resets(first))
        y, after = x[0], HiddenState()
        for cell, (h, c) in zip(self.cells, self.names, strict=True):
            after[h], after[c] = cell(y, (start[h], start[c]))
            y = after[h]
        return y.unsqueeze(0), after

    def _sequence(self, x: Tensor, state: HiddenState, resets: Resets) -> tuple[Tensor, HiddenState]:
        gates = x.new_ones(resets.length * resets.batch, 2)  # (1, 1): padding, keeps c
        gates[resets.rows] = 0.0  # (0, 0): an ordinary step
        gates[resets.reset_rows, 1] = -1.0  # (1, -1): a reset, clears c
        gates = gates.view(resets.length, resets.batch, 2)
        y, output, after = resets.insert(x), x, HiddenState()
        cells: Any = self.cells
        for cell, (h, c) in zip(cells, self.names, strict=True):
            weights = [torch.cat([cell.weight_ih, self.gates], 1), cell.weight_hh, cell.bias_ih, cell.bias_hh]
            start = [state[h].unsqueeze(0), state[c].unsqueeze(0)]
            train = torch.is_grad_enabled()
            y, _, last = torch.lstm(torch.cat([y, gates], 2), start, weights, True, 1, 0.0, train, False, False)
            output = resets.remove(y)
            after[h], after[c] = output[-1], last[0]
        return output, after


def initialize_gates(cell: nn.RNNCellBase, gates: int) -> None:
    """Set orthogonal weights per gate and zero biases."""
    for weight in (cell.weight_ih, cell.weight_hh):
        for gate in weight.data.chunk(gates):
            nn.init.orthogonal_(gate)
    nn.init.zeros_(cell.bias_ih)
    nn.init.zeros_(cell.bias_hh)
