"""Embeddings of sampled actions, on which later parts of the action depend: ``forward(action, features)``."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn


class ChoiceEmbedding(nn.Module):
    """The sum of one learned vector per choice, for k choices out of ``sizes[i]``; a Discrete has one."""

    def __init__(self, sizes: tuple[int, ...], width: int, single: bool) -> None:
        super().__init__()
        self.vectors = nn.Embedding(sum(sizes), width)
        self._single = single
        self.start: Tensor  # of each choice's vectors
        self.register_buffer("start", torch.tensor([0, *accumulate(sizes[:-1])]), persistent=False)

    def forward(self, action: Tensor, features: Tensor) -> Tensor:
        vectors: Tensor = self.vectors(action if self._single else action + self.start)
        return vectors if self._single else vectors.sum(-2)


class NumberEmbedding(nn.Module):
    """A linear function of numbers or bits."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, width)

    def forward(self, action: Tensor, features: Tensor) -> Tensor:
        embedded: Tensor = self.linear(action.to(features.dtype))
        return embedded


class EntityEmbedding(nn.Module):
    """A linear function of the mean features ``[…, C, S]`` of the chosen entities.

    The action is an index into the list, or one bit per entity; without a chosen one the mean is 0.
    """

    def __init__(self, entities: int, width: int, index: bool) -> None:
        super().__init__()
        self._index = index
        self.linear = nn.Linear(width, width)
        self.position: Tensor  # of each entity; functional.one_hot cannot be compiled
        self.register_buffer("position", torch.arange(entities), persistent=False)

    def forward(self, action: Tensor, features: Tensor) -> Tensor:
        chosen = action.unsqueeze(-1) == self.position if self._index else action
        chosen = chosen.to(features.dtype)  # [..., S]
        total = (features @ chosen.unsqueeze(-1)).squeeze(-1)
        embedded: Tensor = self.linear(total / chosen.sum(-1, keepdim=True).clamp(min=1))
        return embedded
