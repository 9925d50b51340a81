"""Check batches for NaN, Inf and masks without a legal action, and observations for their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.spec import Specs, is_mask, mask_name
from ludus.core.types import Tensors


class Fault(NamedTuple):
    """The first NaN or Inf of a batch."""

    kind: Literal["observation", "reward"]
    name: str  # of the observation
    time: int  # index in the batch; the reward at t comes with the observation at t + 1
    row: int  # environment; in a batch from a replay, the item
    element: list[int]  # index within the observation
    value: float


class NotFinite(UserError):
    """An environment returned a NaN or an Inf."""


class Bounds:
    """Finds observations outside the bounds of their specs; each observation is reported once."""

    def __init__(self, observation: Specs, device: torch.device) -> None:
        self._limits: dict[str, tuple[Tensor, Tensor]] = {}
        for name, spec in observation.items():
            if spec.kind != "continuous" or spec.dtype == "uint8" or is_mask(name):
                continue
            each = isinstance(spec.low, tuple) or isinstance(spec.high, tuple)  # bounds differ by element
            bounds = spec.bounds if each else (spec.low, spec.high)
            low, high = (torch.tensor(x, dtype=torch.float64, device=device) for x in bounds)
            if bool(low.isfinite().any()) or bool(high.isfinite().any()):
                self._limits[name] = low, high

    def find(self, observation: Tensors) -> dict[str, float]:
        """Return one value outside of the bounds for each observation that has one."""
        found = {}
        for name, (low, high) in list(self._limits.items()):
            x = observation[name]
            wrong = x[(x < low) | (x > high)]
            if len(wrong):
                found[name] = float(wrong[0])
                del self._limits[name]
        return found


class Mask(NamedTuple):
    """The mask of an action."""

    observation: str  # its name among the observations
    choices: list[int]  # of each element of the action


def find_masks(observation: Specs, action: Specs) -> dict[str, Mask]:
    """Return the masks of all masked actions by the action's name."""
    masks = {name: Mask(mask_name(name, action), list(spec.choices)) for name, spec in action.items()}
    return {name: mask for name, mask in masks.items() if mask.observation in observation}


def finite_flags(batch: Batch, masks: Mapping[str, Mask]) -> list[Tensor]:
    """Return scalar tensors, one of which is not finite if ``check_batch`` would raise (or a sum overflows)."""
    flags = [x.sum() for x in (*batch.observation.values(), batch.reward) if x.is_floating_point()]
    for mask in masks.values():
        flags.append(torch.where(_is_empty(mask, batch).any(), torch.nan, 0.0))
    return flags


def check_batch(batch: Batch, masks: Mapping[str, Mask], environment: str) -> None:
    """Refuse non-finite observations and rewards, and masks of all zeros where the transition is real."""
    if (fault := find_fault(batch)) is not None:
        where = f"{environment} ({describe_row(batch, fault.row)})"
        if fault.kind == "reward":
            raise NotFinite(f"{where}: a reward is not a finite number; fix its step().")
        raise NotFinite(
            f'{where}: a number in observation "{fault.name}", at element {fault.element}, is not finite; '
            f"`ludus check {environment}` helps to find the step that returns it."
        )
    for name, mask in masks.items():
        empty = _is_empty(mask, batch)
        if bool(empty.any()):
            where = describe_row(batch, int(empty.nonzero()[0, 1]))
            raise UserError(
                f'{environment}: the mask of action "{name}" allows nothing ({where}); allow at least one choice, or '
                "end the episode there."
            )


def check_resets(batch: Batch, environment: str) -> None:
    """Refuse steps of a rollout that are real and first although no episode has ended."""
    wrong = batch.real & batch.first[1:] & ~(batch.terminated | batch.truncated)
    if bool(wrong.any()):
        where = describe_row(batch, int(wrong.nonzero()[0, 1]))
        raise UserError(
            f"{environment} ({where}): a step is real and begins an episode, but the one before it was neither "
            "terminated nor truncated; fix the manager."
        )


def describe_row(batch: Batch, row: int) -> str:
    """Name a column of a batch: the row of an environment, or an item drawn from a replay."""
    return f"row {row}" if batch.index is None else f"item {row} of the batch of {batch.reward.shape[1]}"


def find_fault(batch: Batch) -> Fault | None:
    """Return the first observation or reward that is not finite; of one step, the observation."""
    found = [_fault("observation", name, x) for name, x in batch.observation.items() if not _finite(x)]
    if not _finite(batch.reward):
        found.append(_fault("reward", "", batch.reward))
    return min(found, key=lambda fault: fault.time + (fault.kind == "reward"), default=None)


def _fault(kind: Literal["observation", "reward"], name: str, x: Tensor) -> Fault:
    time, row, *element = (~torch.isfinite(x)).nonzero()[0].tolist()
    return Fault(kind, name, time, row, element, float(x[(time, row, *element)]))


def _finite(x: Tensor) -> bool:
    """Whether all values are finite: the sum is, or, as it may overflow, each value is."""
    return not x.is_floating_point() or bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def _is_empty(mask: Mask, batch: Batch) -> Tensor:
    """Return where a mask forbids all options of one of its choices, ``[T, B]``."""
    allowed = batch.observation[mask.observation][:-1].bool()
    parts = [part.any(-1) for part in torch.split(allowed, mask.choices, dim=-1)]
    return ~torch.stack(parts).all(0) & batch.real
