"""Find NaN, Inf and masks that allow nothing in a batch, and observations outside of their bounds."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.spec import Specs, is_mask, mask_name
from ludus.core.types import Tensors


class Fault(NamedTuple):
    """The first NaN or Inf of a batch, and where it stands."""

    kind: Literal["observation", "reward"]
    name: str  # of the observation
    time: (
        int  # its row in the batch: a reward and the observation after it belong to one step, and have times t and t+1
    )
    row: int  # the environment; in a batch from a replay, the item
    element: list[int]  # within the observation
    value: float


class NotFinite(UserError):
    """An environment gave a NaN or an Inf; ``fault`` says where."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


class Bounds:
    """Finds observations outside the bounds that their specs name; each name is found once."""

    def __init__(self, observation: Specs, device: torch.device) -> None:
        self._limits: dict[str, tuple[Tensor, Tensor]] = {}
        for name, spec in observation.items():
            if spec.kind != "continuous" or spec.dtype == "uint8" or is_mask(name):
                continue
            low, high = (torch.tensor(x, dtype=torch.float64) for x in (spec.low, spec.high))
            if not bool(torch.isfinite(torch.cat([low.flatten(), high.flatten()])).any()):
                continue
            shape = spec.shape if low.dim() or high.dim() else ()
            self._limits[name] = tuple(x.expand(spec.size).reshape(shape) if shape else x for x in (low, high))  # type: ignore[assignment]
        self._limits = {n: (a.to(device), b.to(device)) for n, (a, b) in self._limits.items()}

    def find(self, observation: Tensors) -> dict[str, float]:
        """An example of what lies outside, by name."""
        found = {}
        for name, (low, high) in list(self._limits.items()):
            x = observation[name]
            if not low.dim() and bool(x.amin() >= low) and bool(x.amax() <= high):  # the usual case, in two passes
                continue
            wrong = (x < low) | (x > high)
            if bool(wrong.any()):
                found[name] = float(x[wrong][0])
                del self._limits[name]
        return found


def finite_flags(batch: Batch, action: Specs) -> list[Tensor]:
    """0-dimensional tensors, one of which is not finite where ``check_batch`` refuses (or where a sum overflows)."""
    seen = [x for x in batch.observation.values() if x.is_floating_point()]
    flags = [x.sum() for x in (*seen, batch.reward)]
    for name, spec in action.items():
        if (mask := batch.observation.get(mask_name(name, action))) is not None:
            stuck = _stuck(mask[:-1], batch, spec.choices).any()
            flags.append(torch.where(stuck, torch.nan, 0.0))
    return flags


def check_batch(batch: Batch, action: Specs, environment: str) -> None:
    """Refuse non-finite observations and rewards, and masks of all zeros, on rows that a decision was made for."""
    fault = find_fault(batch)
    if fault is not None:
        raise NotFinite(_sentence(fault, f"{environment} ({place(batch, fault.row)})", environment), fault)
    for name, spec in action.items():
        mask = batch.observation.get(mask_name(name, action))
        if mask is not None:
            _check_mask(mask[:-1], batch, spec.choices, f'{environment}: the mask of action "{name}"')


def check_resets(batch: Batch, environment: str) -> None:
    """Refuse steps of a rollout that are real and begin an episode although none has ended."""
    wrong = batch.real & batch.first[1:] & ~(batch.terminated | batch.truncated)
    if bool(wrong.any()):
        raise UserError(
            f"{environment} ({place(batch, int(wrong.nonzero()[0, 1]))}): a step is real and begins an episode, but "
            "neither terminated nor truncated says that the one before has ended; mend its manager."
        )


def place(batch: Batch, row: int) -> str:
    """What a row of a batch is: that of an environment, or an item that was drawn from a replay."""
    return f"row {row}" if batch.index is None else f"item {row} of the batch of {batch.reward.shape[1]}"


def find_fault(batch: Batch) -> Fault | None:
    """The first observation or reward that is not finite, in the order of steps; of one step, the observation."""
    found = [_fault("observation", name, x) for name, x in batch.observation.items() if not _finite(x)]
    if not _finite(batch.reward):
        found.append(_fault("reward", "", batch.reward))
    return min(found, key=lambda fault: fault.time + (fault.kind == "reward"), default=None)


def _fault(kind: Literal["observation", "reward"], name: str, x: Tensor) -> Fault:
    time, row, *element = (~torch.isfinite(x)).nonzero()[0].tolist()
    return Fault(kind, name, time, row, element, float(x[(time, row, *element)]))


def _sentence(fault: Fault, where: str, environment: str) -> str:
    if fault.kind == "reward":
        return f"{where}: a reward is not a finite number; fix its step()."
    return (
        f'{where}: a number in observation "{fault.name}", at element {fault.element}, is not '
        f"finite; `ludus check {environment}` helps to find the step that makes it."
    )


def _finite(x: Tensor) -> bool:
    """One sum is finite unless a term is not (or it overflows: then look again, in full)."""
    return not x.is_floating_point() or bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def _check_mask(mask: Tensor, batch: Batch, sizes: tuple[int, ...], what: str) -> None:
    stuck = _stuck(mask, batch, sizes)
    if bool(stuck.any()):
        where = place(batch, int(stuck.nonzero()[0, 1]))
        raise UserError(f"{what} allows nothing ({where}); allow one choice at least, or end the episode there.")


def _stuck(mask: Tensor, batch: Batch, sizes: tuple[int, ...]) -> Tensor:
    """Where a mask allows nothing for one of its choices, ``[T, B]``."""
    parts = [part.any(-1) for part in torch.split(mask.bool(), list(sizes), dim=-1)]
    return ~torch.stack(parts).all(0) & batch.real
