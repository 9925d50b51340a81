"""Attention pooling of a list."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.arguments import Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.attention import attended_entries, check_heads, join_heads, split_heads
from ludus.networks.cast import cast_shape, zero_padding
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize


class AttentionPool(SubModule):
    """A learned query per head averages a list ``[F, S]`` into a vector of ``width`` (Lee et al. 2019).

    The order of the list does not matter; padding is not attended to, and an empty list gives zeros before the last
    layer.
    """

    dim = 2

    def __init__(self, input_shape: Shape, config: NetworkConfig, *, width: Size = 64, heads: Size = 4) -> None:
        super().__init__(input_shape)
        check_heads(width, heads)
        self.width, self.heads = width, heads
        self.key = initialize(nn.Linear(input_shape[0], width), 1.0, config.orthogonal)
        self.value = initialize(nn.Linear(input_shape[0], width), sqrt(2), config.orthogonal)
        self.query = nn.Parameter(torch.randn(1, 1, width))
        self.output = initialize(nn.Linear(width, width), sqrt(2), config.orthogonal)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.width,), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        x = zero_padding(x, mask).transpose(1, 2)  # [N, S, F]
        query = split_heads(self.query.expand(len(x), -1, -1), self.heads)
        key, value = (split_heads(y, self.heads) for y in (self.key(x), torch.relu(self.value(x))))
        pooled = join_heads(functional.scaled_dot_product_attention(query, key, value, attended_entries(mask)))
        if mask is not None:
            pooled = pooled.masked_fill(~mask.any(1).view(-1, 1, 1), 0)
        return torch.relu(self.output(pooled.squeeze(1))), state
