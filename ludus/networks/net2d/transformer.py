"""Transformers over lists."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.core.arguments import Count, Fraction, Size
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
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        x = self.input(zero_padding(x, mask).transpose(1, 2))  # [N, S, W]
        if self.positions is not None:
            x = x + self.positions
        attended = attended_entries(mask)
        for block in self.blocks:
            x = block(x, attended)
        return zero_padding(self.norm(x).transpose(1, 2), mask), state


class TransformerDec(SubModule):
    """A transformer decoder (Vaswani et al. 2017): queries attend to a list ``[F, S]``; ``[width, queries]`` out.

    The queries are learned, as in DETR and the Perceiver. With ``queries=0`` they are the input itself, and the output
    is ``[width, S]``. What they attend to is ``context`` ``[N, F, S']`` where it is given, else the input.
    """

    dim = 2

    def __init__(
        self,
        input_shape: Shape,
        config: NetworkConfig,
        *,
        queries: Count = 4,
        width: Size = 64,
        layers: Size = 2,
        heads: Size = 4,
        dropout: Fraction = 0.0,
    ) -> None:
        super().__init__(input_shape)
        features, length = input_shape
        self.width, self.length, self.learned = width, queries or length, queries > 0
        if self.learned:
            self.queries = nn.Parameter(torch.randn(queries, width) * INITIAL_STD)
        else:
            self.query_input = initialize(nn.Linear(features, width), 1.0, config.orthogonal)
        self.input = initialize(nn.Linear(features, width), 1.0, config.orthogonal)
        self.input_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, config, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.width, self.length), dim)

    def output_mask(self, mask: Tensor) -> Tensor | None:
        return None if self.learned else mask

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        x = zero_padding(x, mask).transpose(1, 2)  # [N, S, F]
        memory = self.input_norm(self.input(x if context is None else context.transpose(1, 2)))  # [N, S', W]
        attended = attended_entries(mask)
        memory_attended = attended if context is None else None
        if self.learned:
            y, attended, mask = self.queries.expand(len(x), -1, -1), None, None
        else:
            y = self.query_input(x)
        for block in self.blocks:
            y = block(y, attended, memory, memory_attended)
        return zero_padding(self.norm(y).transpose(1, 2), mask), state
