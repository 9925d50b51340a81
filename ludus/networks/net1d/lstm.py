"""LSTM over vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig

GATE_INPUT = 1e4  # opens or closes a gate exactly: sigmoid(±1e4) is 1 or 0, with zero gradient


class LSTM(SubModule):
    """One LSTM layer of ``lstm_size`` units with its state, ``h`` and ``c``, reset to zero wherever ``first`` is true.

    A sequence is one fused call, not a loop over T. An extra step is inserted before each later ``first``, which closes
    the input and forget gates and so sets ``c`` and ``h`` to exactly zero; rows with fewer resets are padded by steps
    that keep ``c``. Splitting the sequences at every ``first`` and padding them took up to 7 times as long.
    """

    dim = 1
    recurrent = True
    network_settings = ("lstm_size",)

    def __init__(self, input_shape: Shape, config: NetworkConfig) -> None:
        super().__init__(input_shape)
        self.size = config.lstm_size
        self.cell = nn.LSTMCell(input_shape[0], self.size)
        if config.orthogonal:
            self._initialize()
        gates = torch.zeros(4 * self.size, 2)  # weights of two extra inputs, to the input gates and the forget gates
        gates[: self.size, 0] = -GATE_INPUT
        gates[self.size : 2 * self.size, 1] = GATE_INPUT
        self.gates: Tensor
        self.register_buffer("gates", gates, persistent=False)

    def _initialize(self) -> None:
        """Set orthogonal weights per gate and a forget bias of 1, so that the initial LSTM keeps its state."""
        for weight in (self.cell.weight_ih, self.cell.weight_hh):
            for gate in weight.data.chunk(4):
                nn.init.orthogonal_(gate)
        nn.init.zeros_(self.cell.bias_ih)
        nn.init.zeros_(self.cell.bias_hh)
        self.cell.bias_ih.data[self.size : 2 * self.size] = 1.0

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.size,), dim)

    def initial_state(self, batch: int) -> HiddenState:
        zeros = self.cell.weight_hh.new_zeros(batch, self.size)
        return HiddenState(h=zeros, c=zeros.clone())

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        start = state.reset(first[0])
        if x.shape[0] == 1:
            h, c = self.cell(x[0], (start["h"], start["c"]))
            return h.unsqueeze(0), HiddenState(h=h, c=c)
        return self._sequence(x, start, torch.cat([torch.zeros_like(first[:1]), first[1:]]))

    def _sequence(self, x: Tensor, state: HiddenState, first: Tensor) -> tuple[Tensor, HiddenState]:
        time, batch, features = x.shape
        step = torch.arange(time, device=x.device).unsqueeze(1) + first.cumsum(0)  # [T, B]: new time index of each row
        length = int(step[-1].max()) + 1
        row = (step * batch + torch.arange(batch, device=x.device)).reshape(-1)
        gates = x.new_ones(length * batch, 2)  # (1, 1): padding, keeps c
        gates[row] = 0.0  # (0, 0): an ordinary step
        gates[(row - batch)[first.reshape(-1)], 1] = -1.0  # (1, -1): a reset, clears c
        padded = x.new_zeros(length * batch, features).index_copy(0, row, x.reshape(-1, features))
        padded = torch.cat([padded, gates], 1).view(length, batch, -1)
        cell, start = self.cell, [state["h"].unsqueeze(0), state["c"].unsqueeze(0)]
        weights = [torch.cat([cell.weight_ih, self.gates], 1), cell.weight_hh, cell.bias_ih, cell.bias_hh]
        output, _, c = torch.lstm(padded, start, weights, True, 1, 0.0, torch.is_grad_enabled(), False, False)
        output = output.reshape(length * batch, -1).index_select(0, row).view(time, batch, -1)
        return output, HiddenState(h=output[-1], c=c[0])
