"""Multi-head attention over lists with padding, and the blocks of transformers."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.errors import UserError
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize

EXPANSION = 4  # width of a block's hidden layer, relative to its input


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017) by torch's scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, config: NetworkConfig, dropout: float = 0.0) -> None:
        super().__init__()
        check_heads(width, heads)
        self.heads = heads
        self.query = initialize(nn.Linear(width, width), 1.0, config.orthogonal)
        self.key = initialize(nn.Linear(width, width), 1.0, config.orthogonal)
        self.value = initialize(nn.Linear(width, width), 1.0, config.orthogonal)
        self.output = initialize(nn.Linear(width, width), 1.0, config.orthogonal)
        self.dropout = nn.Dropout(dropout) if dropout else None  # its rate is used while training

    def forward(self, x: Tensor, context: Tensor, attended: Tensor | None = None) -> Tensor:
        """Let ``x`` ``[N, Q, W]`` attend to ``context`` ``[N, S, W]`` where ``attended`` ``[N, 1, 1, S]`` is true."""
        query, key, value = (
            split_heads(layer(y), self.heads)
            for layer, y in ((self.query, x), (self.key, context), (self.value, context))
        )
        rate = self.dropout.p if self.dropout is not None and self.training else 0.0
        found = functional.scaled_dot_product_attention(query, key, value, attended, rate)
        y: Tensor = self.output(join_heads(found))
        return y


class FeedForward(nn.Module):
    """The two-layer network of a transformer's block."""

    def __init__(self, width: int, config: NetworkConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = initialize(nn.Linear(width, EXPANSION * width), sqrt(2), config.orthogonal)
        self.output = initialize(nn.Linear(EXPANSION * width, width), 1.0, config.orthogonal)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.output(torch.relu(self.hidden(x))))
        return y


class EncoderBlock(nn.Module):
    """Self-attention and a feed-forward network, each on normalized input and added to it (pre-norm)."""

    def __init__(self, width: int, heads: int, config: NetworkConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads, config, dropout)
        self.feed_forward_norm, self.feed_forward = nn.LayerNorm(width), FeedForward(width, config, dropout)

    def forward(self, x: Tensor, attended: Tensor | None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, attended)
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class DecoderBlock(nn.Module):
    """Self-attention, attention to a context, and a feed-forward network, each pre-norm and added to its input."""

    def __init__(self, width: int, heads: int, config: NetworkConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads, config, dropout)
        self.cross_norm, self.cross_attention = nn.LayerNorm(width), Attention(width, heads, config, dropout)
        self.feed_forward_norm, self.feed_forward = nn.LayerNorm(width), FeedForward(width, config, dropout)

    def forward(self, x: Tensor, attended: Tensor | None, context: Tensor, context_attended: Tensor | None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, attended)
        x = x + self.cross_attention(self.cross_norm(x), context, context_attended)
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


def check_heads(width: int, heads: int) -> None:
    """Raise a UserError if ``width`` cannot be divided among the heads."""
    if width % heads:
        raise UserError(f"width is {width} and heads is {heads}; heads must divide width.")


def attended_entries(mask: Tensor | None) -> Tensor | None:
    """Return a padding mask ``[N, S]`` as ``[N, 1, 1, S]`` for attention; all true where a list is empty.

    The entries of an empty list are zero, and attention to nothing would be NaN.
    """
    return None if mask is None else (mask | ~mask.any(1, keepdim=True)).view(len(mask), 1, 1, -1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return ``[N, S, W]`` as ``[N, heads, S, W / heads]``."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Return ``[N, heads, S, W / heads]`` as ``[N, S, W]``."""
    return x.transpose(1, 2).flatten(2)
