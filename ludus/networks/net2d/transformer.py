"""Transformers over lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ludus.core.arguments import Fraction, Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.attention import DecoderBlock, EncoderBlock, attended_entries
from ludus.networks.cast import cast_shape, zero_padding
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize

INITIAL_STD = 0.02  # of learned positions and queries, as in GPT-2 and DETR


class TransformerEnc(SubModule):
    """A transformer encoder (Vaswani et al. 2017), pre-norm: a list ``[F, S]`` in, ``[width, S]`` out.

    Without ``positions`` the order of the list does not matter: permuted entries give permuted outputs. Padding is not
    attended to, and its output is zero.
    """

    dim = 2

    def __init__(
        self,
        input_shape: Shape,
        config: NetworkConfig,
        *,
        width: Size = 64,
        layers: Size = 2,
        heads: Size = 4,
        dropout: Fraction = 0.0,
        positions: bool = False,
    ) -> None:
        super().__init__(input_shape)
        features, length = input_shape
        self.width = width
        self.input = initialize(nn.Linear(features, width), 1.0, config.orthogonal)
        self.positions = nn.Parameter(torch.randn(length, width) * INITIAL_STD) if positions else None
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, config, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.width, self.input_shape[1]), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        x = self.input(zero_padding(x, mask).transpose(1, 2))  # [N, S, W]
        if self.positions is not None:
            x = x + self.positions
        attended = attended_entries(mask)
        for block in self.blocks:
            x = block(x, attended)
        return zero_padding(self.norm(x).transpose(1, 2), mask), state


class TransformerDec(SubModule):
    """A transformer decoder (Vaswani et al. 2017), pre-norm: queries attend to a list.

    Learned queries, as in DETR and the Perceiver, attend to the input ``[F, S]``; ``[width, queries]`` out. With
    ``queries="given"`` the input ``[F, Q]`` is the queries, which attend to a context ``[F', S]``; ``[width, Q]`` out.
    """

    dim = 2
    keeps_entries = False  # the outputs are those of queries

    def __init__(
        self,
        input_shape: Shape,
        config: NetworkConfig,
        context_shape: Shape | None = None,
        /,
        *,
        queries: Size | Literal["given"] = 4,
        width: Size = 64,
        layers: Size = 2,
        heads: Size = 4,
        dropout: Fraction = 0.0,
    ) -> None:
        super().__init__(input_shape)
        features, length = input_shape
        self.width = width
        if queries == "given":
            self.queries, self.length = None, length
            self.query_input = initialize(nn.Linear(features, width), 1.0, config.orthogonal)
        else:
            self.queries, self.length = nn.Parameter(torch.randn(queries, width) * INITIAL_STD), queries
        attended_shape = input_shape if context_shape is None else context_shape
        self.input = initialize(nn.Linear(attended_shape[0], width), 1.0, config.orthogonal)
        self.input_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, config, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    @classmethod
    def uses_context(cls, arguments: Mapping[str, Any]) -> bool:
        return arguments.get("queries") == "given"

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.width, self.length), dim)

    def output_mask(self, mask: Tensor) -> Tensor | None:
        return mask if self.queries is None else None

    def forward(
        self,
        x: Tensor,
        state: HiddenState,
        first: Tensor,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, HiddenState]:
        if self.queries is None:
            y = self.query_input(zero_padding(x, mask).transpose(1, 2))  # [N, Q, W]
        else:
            y, context, context_mask, mask = self.queries.expand(len(x), -1, -1), x, mask, None
        assert context is not None  # ModularNetwork gives one to a piece that uses it
        memory = self.input_norm(self.input(zero_padding(context, context_mask).transpose(1, 2)))  # [N, S, W]
        attended, memory_attended = attended_entries(mask), attended_entries(context_mask)
        for block in self.blocks:
            y = block(y, attended, memory, memory_attended)
        return zero_padding(self.norm(y).transpose(1, 2), mask), state
