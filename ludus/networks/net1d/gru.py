"""GRU over vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.arguments import Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape
from ludus.networks.config import NetworkConfig
from ludus.networks.net1d.lstm import initialize_gates
from ludus.networks.net1d.recurrent import RecurrentPiece
from ludus.networks.net1d.resets import GATE_INPUT, Resets


class GRU(RecurrentPiece):
    """GRU layers of ``size`` units (Cho et al. 2014), with a hidden state that each episode resets.

    A sequence is one fused call per layer, not a loop over T: an inserted step before each ``first`` closes both gates
    and cancels the bias of the candidate, and so sets ``h`` to exactly zero.
    """

    def __init__(
        self, input_shape: Shape, config: NetworkConfig, *, size: Size | None = None, layers: Size = 1
    ) -> None:
        super().__init__(input_shape, config, size, layers)
        cells = [nn.GRUCell(n, self.size) for n in self.input_sizes]
        if config.orthogonal:
            for cell in cells:
                initialize_gates(cell, gates=3)
        self.cells = nn.ModuleList(cells)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        start = state.reset(first[0])
        if x.shape[0] > 1:
            return self._sequence(x, start, Resets(first))
        y, after = x[0], HiddenState()
        for cell, (h,) in zip(self.cells, self.names, strict=True):
            y = after[h] = cell(y, start[h])
        return y.unsqueeze(0), after

    def _sequence(self, x: Tensor, state: HiddenState, resets: Resets) -> tuple[Tensor, HiddenState]:
        reset = x.new_zeros(resets.length * resets.batch, 1)  # an extra input: 1 at inserted steps
        reset[resets.reset_rows] = 1.0
        reset = reset.view(resets.length, resets.batch, 1)
        closed = x.new_full((2 * self.size,), -GATE_INPUT)
        y, output, after = resets.insert(x), x, HiddenState()
        cells: Any = self.cells
        for cell, (h,) in zip(cells, self.names, strict=True):
            gates = torch.cat([closed, -cell.bias_ih[2 * self.size :]]).unsqueeze(1)
            weights = [torch.cat([cell.weight_ih, gates], 1), cell.weight_hh, cell.bias_ih, cell.bias_hh]
            start, train = state[h].unsqueeze(0), torch.is_grad_enabled()
            y, _ = torch.gru(torch.cat([y, reset], 2), start, weights, True, 1, 0.0, train, False, False)
            output = resets.remove(y)
            after[h] = output[-1]
        return output, after
