"""Normalization layers by name."""

from __future__ import annotations

from math import gcd
from typing import Any, Literal

from torch import nn

Norm = Literal["none", "layer", "batch", "group"]

GROUP_SIZE = 16  # features per group of a group norm, where their number allows
MIN_GROUP_SIZE = 4  # normalizing fewer numbers would lose most of what they say


def make_norm(norm: Norm, features: int, rank: int) -> nn.Module:
    """Make a normalization of ``[N, features, …]`` with ``rank`` dimensions per row.

    A layer norm of maps normalizes each row over features and space, as a group norm of one group.
    """
    if norm == "batch":
        batch_norm: Any = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[rank]
        return batch_norm(features)  # type: ignore[no-any-return]
    if norm == "layer":
        return nn.LayerNorm(features) if rank == 1 else nn.GroupNorm(1, features)
    if norm == "group":
        size = gcd(features, GROUP_SIZE)
        return nn.GroupNorm(features // size if size >= MIN_GROUP_SIZE else 1, features)
    return nn.Identity()
