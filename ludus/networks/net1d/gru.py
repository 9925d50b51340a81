"""GRU over vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.arguments import Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.net1d.lstm import initialize_gates
from ludus.networks.net1d.resets import GATE_INPUT, Resets


class GRU(SubModule):
    """GRU layers of ``size`` units (Cho et al. 2014), with a hidden state that each episode resets.

    A sequence is one fused call per layer, not a loop over T: an inserted step before each ``first`` closes both gates
    and cancels the bias of the candidate, and so sets ``h`` to exactly zero. ``h`` is ``[B, layers · size]``.
    """

    dim = 1
    recurrent = True
    network_settings = ("lstm_size",)

    def __init__(
        self, input_shape: Shape, config: NetworkConfig, *, size: Size | None = None, layers: Size = 1
    ) -> None:
        super().__init__(input_shape)
        self.size = size or config.lstm_size
        cells = [nn.GRUCell(self.size if i else input_shape[0], self.size) for i in range(layers)]
        if config.orthogonal:
            for cell in cells:
                initialize_gates(cell, gates=3)
        self.cells = nn.ModuleList(cells)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.size,), dim)

    def initial_state(self, batch: int) -> HiddenState:
        return HiddenState(h=next(self.parameters()).new_zeros(batch, len(self.cells) * self.size))

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        states = torch.split(state.reset(first[0])["h"], self.size, 1)
        if x.shape[0] == 1:
            output, after = self._step(x[0], states)
        else:
            output, after = self._sequence(x, states, Resets(first))
        return output, HiddenState(h=after[0] if len(after) == 1 else torch.cat(after, 1))

    def _step(self, x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        after: list[Tensor] = []
        for cell, start in zip(self.cells, states, strict=True):
            x = cell(x, start)
            after.append(x)
        return x.unsqueeze(0), after

    def _sequence(self, x: Tensor, states: tuple[Tensor, ...], resets: Resets) -> tuple[Tensor, list[Tensor]]:
        reset = x.new_zeros(resets.length * resets.batch, 1)  # an extra input: 1 at inserted steps
        reset[resets.reset_rows] = 1.0
        reset = reset.view(resets.length, resets.batch, 1)
        x, after = resets.insert(x), []
        cells: Any = self.cells
        for cell, start in zip(cells, states, strict=True):
            closed = x.new_full((2 * self.size,), -GATE_INPUT)
            gates = torch.cat([closed, -cell.bias_ih[2 * self.size :]]).unsqueeze(1)
            weights = [torch.cat([cell.weight_ih, gates], 1), cell.weight_hh, cell.bias_ih, cell.bias_hh]
            train = torch.is_grad_enabled()
            x, _ = torch.gru(torch.cat([x, reset], 2), start.unsqueeze(0), weights, True, 1, 0.0, train, False, False)
            after.append(resets.last(x))
        return resets.remove(x), after
