"""A multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from typing import Literal

from torch import Tensor, nn

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize
from ludus.ops.activations import ACTIVATIONS


class MLP(SubModule):
    """Linear layers of sizes ``hidden``, each followed by the activation."""

    dim: Literal[1, 2, 3, 4] = 1
    network_settings = ("hidden", "activation")

    def __init__(self, input_shape: Shape, config: NetworkConfig) -> None:
        super().__init__(input_shape)
        sizes = [input_shape[0], *config.hidden]
        self.layers = nn.ModuleList(initialize(nn.Linear(n, m), sqrt(2), config.orthogonal) for n, m in pairwise(sizes))
        self.activation = config.activation
        self._size = sizes[-1]

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self._size,), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        activate = ACTIVATIONS[self.activation]
        for layer in self.layers:
            x = activate(layer(x))
        return x, state
