"""A look at every batch for what would silently spoil learning: numbers that are none, and masks that allow nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.errors import UserError
from ludus.core.spec import Specs, mask_name
from ludus.core.types import Batch


def check_batch(batch: Batch, action: Specs, environment: str) -> None:
    """Refuse non-finite observations and rewards, and masks of all zeros, on rows that a decision was made for."""
    for name, x in batch.observation.items():
        if x.is_floating_point() and not _finite(x):
            where = (~torch.isfinite(x)).nonzero()[0].tolist()
            raise UserError(
                f'{environment} (row {where[1]}): a number in observation "{name}", at element {where[2:]}, is not '
                f"finite; `ludus check {environment}` helps to find the step that makes it."
            )
    if not _finite(batch.reward):
        row = int((~torch.isfinite(batch.reward)).nonzero()[0, 1])
        raise UserError(f"{environment} (row {row}): a reward is not a finite number; mend its step().")
    for name, spec in action.items():
        mask = batch.observation.get(mask_name(name, action))
        if mask is not None and spec.kind == "categorical":
            _check_mask(mask[:-1], batch.weight, spec.sizes, f'{environment}: the mask of action "{name}"')


def _finite(x: Tensor) -> bool:
    """One sum is finite unless a term is not (or it overflows: then look again, in full)."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def _check_mask(mask: Tensor, weight: Tensor, sizes: tuple[int, ...], what: str) -> None:
    for part in torch.split(mask.bool(), list(sizes), dim=-1):
        stuck = ~part.any(-1) & (weight > 0)
        if bool(stuck.any()):
            row = int(stuck.nonzero()[0, 1])
            raise UserError(f"{what} allows nothing (row {row}); allow one choice at least, or end the episode there.")
