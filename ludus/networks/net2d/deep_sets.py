"""Networks that treat each entry of a list alike: one MLP for all entries, and its pooled sum, mean or maximum."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from ludus.core.arguments import Sizes
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape, zero_padding
from ludus.networks.config import Activation, NetworkConfig
from ludus.networks.init import initialize
from ludus.ops.activations import ACTIVATIONS


class EntityMLP(SubModule):
    """The same MLP for each entry of a list: ``[F, S]`` in, ``[last of hidden, S]`` out; the output of padding is 0."""

    dim = 2
    network_settings: tuple[str, ...] = ("hidden", "activation")

    def __init__(
        self,
        input_shape: Shape,
        config: NetworkConfig,
        *,
        hidden: Sizes | None = None,
        activation: Activation | None = None,
    ) -> None:
        super().__init__(input_shape)
        sizes = [input_shape[0], *(config.hidden if hidden is None else hidden)]
        self.layers = nn.ModuleList(initialize(nn.Linear(n, m), sqrt(2), config.orthogonal) for n, m in pairwise(sizes))
        self.activation, self._size = activation or config.activation, sizes[-1]

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self._size, self.input_shape[1]), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        activate = ACTIVATIONS[self.activation]
        x = zero_padding(x, mask).transpose(1, 2).contiguous()
        for layer in self.layers:
            x = activate(layer(x))
        return zero_padding(x.transpose(1, 2), mask), state


class DeepSets(SubModule):
    """An MLP for each entry of a list, pooled over the list, and an MLP of the result (Zaheer et al. 2017).

    ``[F, S]`` in, a vector out that does not depend on the order. Padding is left out; an empty list is pooled to 0.
    """

    dim = 2
    network_settings = ("hidden", "activation")

    def __init__(
        self,
        input_shape: Shape,
        config: NetworkConfig,
        *,
        hidden: Sizes | None = None,
        activation: Activation | None = None,
        pool: Literal["mean", "sum", "max"] = "mean",
    ) -> None:
        super().__init__(input_shape)
        self.pool = pool
        self.entity = EntityMLP(input_shape, config, hidden=hidden, activation=activation)
        size = self.entity.output_shape()[0]
        self.output = initialize(nn.Linear(size, size), sqrt(2), config.orthogonal)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.output.out_features,), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        x, _ = self.entity(x, state, first, mask)  # [N, F, S], zero where padded
        return ACTIVATIONS[self.entity.activation](self.output(self._pool(x, mask))), state

    def _pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.pool == "sum":
            return x.sum(2)
        if self.pool == "mean":
            return x.mean(2) if mask is None else x.sum(2) / mask.sum(1, keepdim=True).clamp(min=1)
        if mask is None:
            return x.amax(2)
        largest = x.masked_fill(~mask.unsqueeze(1), -torch.inf).amax(2)
        return largest.masked_fill(~mask.any(1, keepdim=True), 0)
