"""Reshape tensors from one rank to another, and join shapes of the same rank: features first, then space.

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

from math import prod

from torch import Tensor

from ludus.core.errors import UserError
from ludus.core.network import Shape, Shapes


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


def join_shapes(shapes: Shapes, body: str) -> Shape:
    """Return the shape of sources concatenated on features, with sizes of 1 expanded to those of the others."""
    names = list(shapes)
    space = list(shapes[names[0]][1:])
    source = [names[0]] * len(space)  # the source that set each size
    for name in names[1:]:
        for i, size in enumerate(shapes[name][1:]):
            if size != space[i] and 1 not in (size, space[i]):
                raise UserError(
                    f'Observations "{source[i]}" and "{name}" cannot be joined for the body {body}: their sources have '
                    f"the shapes {shapes[source[i]]} and {shapes[name]}; choose other pieces for them, or a body of "
                    "rank 1."
                )
            if space[i] == 1:
                space[i], source[i] = size, name
    return (sum(shape[0] for shape in shapes.values()), *space)
