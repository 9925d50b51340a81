"""A multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise
from math import prod, sqrt
from typing import Literal

from torch import Tensor, nn

from ludus.core.arguments import Fraction, Sizes
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import Activation, NetworkConfig
from ludus.networks.init import initialize
from ludus.networks.norm import Norm, make_norm
from ludus.ops.activations import ACTIVATIONS


class MLP(SubModule):
    """Linear layers of sizes ``hidden``, each followed by norm, activation and dropout.

    ``norm``: layer, batch, batch_renorm or group.
    """

    dim: Literal[1, 2, 3, 4] = 1
    network_settings = ("hidden", "activation")

    def __init__(
        self,
        input_shape: Shape,
        config: NetworkConfig,
        *,
        hidden: Sizes | None = None,
        activation: Activation | None = None,
        norm: Norm = "none",
        dropout: Fraction = 0.0,
    ) -> None:
        super().__init__(input_shape)
        sizes = [prod(input_shape), *(config.hidden if hidden is None else hidden)]
        self.layers = nn.ModuleList(initialize(nn.Linear(n, m), sqrt(2), config.orthogonal) for n, m in pairwise(sizes))
        self.activation = activation or config.activation
        self.plain = norm == "none" and dropout == 0  # faster engines compute plain MLPs only
        if not self.plain:
            self.norms = nn.ModuleList(make_norm(norm, size, rank=1) for size in sizes[1:])
            self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self._size = sizes[-1]

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self._size,), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        activate = ACTIVATIONS[self.activation]
        if self.plain:
            for layer in self.layers:
                x = activate(layer(x))
            return x, state
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.dropout(activate(norm(layer(x))))
        return x, state
