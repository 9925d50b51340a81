"""A residual multi-layer perceptron."""

from __future__ import annotations

from math import sqrt

from torch import Tensor, nn

from ludus.core.arguments import Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import Activation, NetworkConfig
from ludus.networks.init import initialize
from ludus.ops.activations import ACTIVATIONS

EXPANSION = 4  # width of a block's hidden layer, relative to its input


class ResidualMLP(SubModule):
    """A linear layer, residual blocks x + MLP(LayerNorm(x)) and a last LayerNorm, as in SimBa (Lee et al. 2025)."""

    dim = 1

    def __init__(
        self,
        input_shape: Shape,
        config: NetworkConfig,
        *,
        size: Size = 128,
        blocks: Size = 2,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(input_shape)
        self.size, self.activation = size, activation
        self.input = initialize(nn.Linear(input_shape[0], size), 1.0, config.orthogonal)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(blocks))
        self.hidden = nn.ModuleList(
            initialize(nn.Linear(size, EXPANSION * size), sqrt(2), config.orthogonal) for _ in range(blocks)
        )
        self.output = nn.ModuleList(
            initialize(nn.Linear(EXPANSION * size, size), 1.0, config.orthogonal) for _ in range(blocks)
        )
        self.last_norm = nn.LayerNorm(size)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.size,), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        activate = ACTIVATIONS[self.activation]
        x = self.input(x)
        for norm, hidden, output in zip(self.norms, self.hidden, self.output, strict=True):
            x = x + output(activate(hidden(norm(x))))
        return self.last_norm(x), state
