"""A look at every batch for what would silently spoil learning: numbers that are none, and masks that allow nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.errors import UserError
from ludus.core.spec import Specs, mask_name
from ludus.core.types import Batch


def check_batch(batch: Batch, action: Specs) -> None:
    """Refuse non-finite observations and rewards, and masks of all zeros, on rows that a decision was made for."""
    for name, x in batch.observation.items():
        if x.is_floating_point() and not _finite(x):
            where = (~torch.isfinite(x)).nonzero()[0].tolist()
            raise UserError(
                f'Environment {where[1]} gave a non-finite number in observation "{name}" at element {where[2:]}; '
                "`ludus check ENV` helps to find the step that makes it."
            )
    if not _finite(batch.reward):
        row = int((~torch.isfinite(batch.reward)).nonzero()[0, 1])
        raise UserError(f"Environment {row} gave a reward that is not a finite number; mend its step().")
    for name, spec in action.items():
        mask = batch.observation.get(mask_name(name, action))
        if mask is not None and spec.kind == "categorical":
            _check_mask(mask[:-1], batch.weight, spec.sizes, name)


def _finite(x: Tensor) -> bool:
    """One sum is finite unless a term is not (or it overflows: then look again, in full)."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def _check_mask(mask: Tensor, weight: Tensor, sizes: tuple[int, ...], name: str) -> None:
    for i, part in enumerate(torch.split(mask.bool(), list(sizes), dim=-1)):
        stuck = ~part.any(-1) & (weight > 0)
        if bool(stuck.any()):
            row = int(stuck.nonzero()[0, 1])
            which = f'"{name}"' if len(sizes) == 1 else f'"{name}", element {i}'
            raise UserError(
                f"Environment {row} gave an action mask of all zeros for action {which}; allow one choice at least, "
                "or end the episode there."
            )
