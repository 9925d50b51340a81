"""A multi-layer perceptron over a flattened matrix."""

from __future__ import annotations

from math import prod

from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape
from ludus.networks.config import NetworkConfig
from ludus.networks.net1d.mlp import MLP


class FlatMLP(MLP):
    """An MLP over the flattened ``[F, S]``, for stacked vectors, boards and tables."""

    dim = 2

    def __init__(self, input_shape: Shape, config: NetworkConfig) -> None:
        super().__init__((prod(input_shape),), config)
        self.input_shape = input_shape

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        return super().forward(x.flatten(1), state, first)
