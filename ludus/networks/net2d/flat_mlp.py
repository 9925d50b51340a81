"""A multi-layer perceptron over a flattened matrix."""

from __future__ import annotations

from math import prod

from torch import Tensor

from ludus.core.arguments import Fraction, Sizes
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape
from ludus.networks.cast import zero_padding
from ludus.networks.config import Activation, NetworkConfig
from ludus.networks.net1d.mlp import MLP
from ludus.networks.norm import Norm


class FlatMLP(MLP):
    """An MLP over the flattened ``[F, S]``, for stacked vectors, boards and tables; padding of a list is zero."""

    dim = 2

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
        size = (prod(input_shape),)
        super().__init__(size, config, hidden=hidden, activation=activation, norm=norm, dropout=dropout)
        self.input_shape = input_shape

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        return super().forward(zero_padding(x, mask).flatten(1), state, first)
