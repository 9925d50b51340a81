"""A multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise
from math import prod, sqrt
from typing import Literal

from torch import Tensor, nn

from ludus.core.arguments import Fraction, Sizes
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import Activation, NetworkConfig
from ludus.networks.init import initialize
from ludus.networks.norm import Norm, make_norm
from ludus.ops.activations import ACTIVATIONS


class MLP(SubModule):
    """Linear layers of sizes ``hidden``, each followed by norm, activation and dropout.

    ``norm``: layer, batch, batch_renorm or group. ``dropout_first``: dropout comes before norm and activation (DroQ).
    ``norm_inputs``: the input of every linear layer is normalized, in place of its output, and so is the output of the
    last activation, the input of what follows (CrossQ).
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
        dropout_first: bool = False,
        norm_inputs: bool = False,
    ) -> None:
        super().__init__(input_shape)
        if dropout_first and (norm_inputs or not dropout):
            raise UserError("dropout_first needs dropout, and does not go together with norm_inputs; leave it out.")
        if norm_inputs and norm == "none":
            raise UserError("norm_inputs needs a norm, such as batch_renorm; name one, or leave it out.")
        sizes = [prod(input_shape), *(config.hidden if hidden is None else hidden)]
        self.layers = nn.ModuleList(initialize(nn.Linear(n, m), sqrt(2), config.orthogonal) for n, m in pairwise(sizes))
        self.activation = activation or config.activation
        self.plain = norm == "none" and dropout == 0  # faster engines compute plain MLPs only
        self.dropout_first, self.norm_inputs = dropout_first, norm_inputs
        if not self.plain:
            self.norms = nn.ModuleList(make_norm(norm, size, rank=1) for size in (sizes if norm_inputs else sizes[1:]))
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
        if self.norm_inputs:
            first_norm, *norms = self.norms
            x = first_norm(x)
            for layer, norm in zip(self.layers, norms, strict=True):
                x = norm(self.dropout(activate(layer(x))))
        elif self.dropout_first:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = activate(norm(self.dropout(layer(x))))
        else:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = self.dropout(activate(norm(layer(x))))
        return x, state
