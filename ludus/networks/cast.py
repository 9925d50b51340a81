"""Reshape tensors from one rank to another, and join tensors of the same rank: features first, then space.

======================  =========  ========  =========  =========
from                    to 1D      to 2D     to 3D      to 4D
======================  =========  ========  =========  =========
1D ``F``                F          F,1       F,1,1      F,1,1,1
2D ``F,S``              F·S        F,S       F·S,1,1    F,S,1,1
3D ``F,H,W``            F·H·W      F,H·W     F,H,W      F,1,H,W
4D ``F,D,H,W``          F·D·H·W    F,D·H·W   F·D,H,W    F,D,H,W
======================  =========  ========  =========  =========
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ludus.core.errors import UserError
from ludus.core.network import NONE, Shape, Shapes

Features = tuple[Tensor, Tensor | None]  # a tensor [N, …], and the mask [N, S] of a padded list [N, F, S]


def cast_shape(shape: Shape, dim: int | None) -> Shape:
    """Return the shape of a row of rank 1 to 4 cast to rank ``dim``; unchanged if ``dim`` is None."""
    rank = len(shape)
    if dim is None or dim == rank:
        return shape
    if dim == 1:
        return (prod(shape),)
    if dim == 2:
        return (shape[0], prod(shape[1:]))
    if dim == 3:
        return (shape[0] * shape[1], *shape[2:]) if rank == 4 else (prod(shape), 1, 1)
    return (shape[0], 1, *shape[1:]) if rank == 3 else (*shape, *[1] * (4 - rank))


def cast(x: Tensor, dim: int) -> Tensor:
    """Cast ``x`` ``[N, …]``, with one leading dimension, to rank ``dim``."""
    if x.dim() - 1 == dim:
        return x
    return x.reshape(x.shape[0], *cast_shape(tuple(x.shape[1:]), dim))


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the padded entries of ``x`` ``[N, F, S, …]``, so that what stands there cannot matter, not even NaN."""
    return x if mask is None else x.masked_fill(~mask.reshape(len(mask), 1, -1, *[1] * (x.dim() - 3)), 0)


def cast_features(features: Features, dim: int) -> Features:
    """Cast a tensor ``[N, …]`` to rank ``dim``; padding is zeroed where the result is not a list."""
    x, mask = features
    if x.dim() - 1 == dim:
        return features
    return cast(zero_padding(x, mask), dim), None


class Join(NamedTuple):
    """How some of several tensors become one of rank ``rank``: cast, sizes of 1 expanded, concatenated on features."""

    rank: int
    shape: Shape  # of the result
    parts: tuple[int, ...]  # the tensors that are joined
    lists: tuple[int, ...] = ()  # the parts that are concatenated on the sequence first

    def __call__(self, tensors: Sequence[Features]) -> Features:
        """Return the joined tensor, and its mask if some list is padded."""
        parts = [cast_features(tensors[i], self.rank) for i in self.parts]
        if len(parts) == 1:
            return parts[0]
        if self.lists:
            long = _concatenate_lists([parts[i] for i in self.lists])
            parts = [long, *(part for i, part in enumerate(parts) if i not in self.lists)]
        space, mask = self.shape[1:], None
        joined = []
        for x, padding in parts:
            expands = x.shape[2:] != space
            mask = padding if padding is not None and not expands else mask
            joined.append(zero_padding(x, padding).expand(*x.shape[:2], *space) if expands else x)
        return torch.cat(joined, 1) if len(joined) > 1 else joined[0], mask


def _concatenate_lists(parts: list[Features]) -> Features:
    x = torch.cat([x for x, _ in parts], 2)
    if all(mask is None for _, mask in parts):
        return x, None
    present = x.new_ones((), dtype=torch.bool)
    return x, torch.cat([present.expand(len(x), x_.shape[2]) if m is None else m for x_, m in parts], 1)


def plan_join(shapes: Shapes, rank: int, place: str, masks: Mapping[str, str] = NONE) -> Join:
    """Plan how to join all outputs of sources for ``place``, such as ``the body mlp``.

    ``masks`` names the padding mask of each padded list. Lists of different length, or with masks of their own, are
    joined on the sequence and need equal features; all else is joined on features, with sizes of 1 expanded. A list of
    length 1 without a mask is no different from a vector.
    """
    before, shapes = shapes, {name: cast_shape(shape, rank) for name, shape in shapes.items()}
    names, parts = list(shapes), tuple(range(len(shapes)))
    lists = [name for name in names if rank == 2 and (shapes[name][1] > 1 or name in masks)]
    distinct = {(shapes[name][1], masks.get(name, "")) for name in lists}
    if len(distinct) > 1:  # entries of equal index are not the same entity
        for name in lists[1:]:
            if shapes[name][0] != shapes[lists[0]][0]:
                raise _not_joinable(lists[0], name, before, place)
        features = shapes[lists[0]][0] + sum(shapes[name][0] for name in names if name not in lists)
        length = sum(shapes[name][1] for name in lists)
        return Join(rank, (features, length), parts, tuple(map(names.index, lists)))
    space = list(shapes[names[0]][1:])
    source = [names[0]] * len(space)  # the source that set each size
    for name in names[1:]:
        for i, size in enumerate(shapes[name][1:]):
            if size != space[i] and 1 not in (size, space[i]):
                raise _not_joinable(source[i], name, before, place)
            if space[i] == 1:
                space[i], source[i] = size, name
    return Join(rank, (sum(shape[0] for shape in shapes.values()), *space), parts)


def _not_joinable(one: str, other: str, shapes: Shapes, place: str) -> UserError:
    both = f'Observations "{one}" and "{other}" cannot be joined for {place}: their sources have the shapes'
    if len(shapes[one]) == len(shapes[other]) == 2:
        return UserError(
            f"{both} {shapes[one]} and {shapes[other]}, and lists need equal features to become one; "
            "set network.net2d to entity_mlp, which gives them as many, or choose a body of rank 1."
        )
    return UserError(f"{both} {shapes[one]} and {shapes[other]}; choose other pieces for them, or a body of rank 1.")
