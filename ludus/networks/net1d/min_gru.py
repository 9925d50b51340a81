"""A GRU whose gates do not depend on its state, computed for all time steps at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.core.arguments import Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize
from ludus.networks.net1d.recurrent import RecurrentPiece
from ludus.ops.scan import linear_scan

GATE_BIAS = -1.0  # the initial layer keeps most of its state


class MinGRU(RecurrentPiece):
    """minGRU layers of ``size`` units (Feng et al. 2024): h_t = (1 − z_t) h_{t−1} + z_t W x_t, parallel over time.

    The gates z_t = σ(V x_t) do not depend on h, so a sequence is a scan with log₂ T steps.
    """

    def __init__(
        self, input_shape: Shape, config: NetworkConfig, *, size: Size | None = None, layers: Size = 1
    ) -> None:
        super().__init__(input_shape, config, size, layers)
        gates, candidates = (
            [initialize(nn.Linear(n, self.size), 1.0, config.orthogonal) for n in self.input_sizes] for _ in range(2)
        )
        self.gates, self.candidates = nn.ModuleList(gates), nn.ModuleList(candidates)
        if config.orthogonal:
            for gate in gates:
                nn.init.constant_(gate.bias, GATE_BIAS)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        after = HiddenState()
        for gate, candidate, (h,) in zip(self.gates, self.candidates, self.names, strict=True):
            z = torch.sigmoid(gate(x))
            keep = (1 - z).masked_fill(first.unsqueeze(-1), 0)
            x = linear_scan((z * candidate(x)).flip(0), keep.flip(0), state[h]).flip(0)  # the scan runs backwards
            after[h] = x[-1]
        return x, after
