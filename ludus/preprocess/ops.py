"""Ops on observations that run on the device of the networks, as modules on tensors ``[T, B, *shape]``.

A constructor takes the spec of its input and the arguments of the setting; ``output`` is the spec of the result. It
raises a ValueError with the reason if it does not take this spec.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.spec import Spec

DTYPES = {"float32": torch.float32, "uint8": torch.uint8}


class Op(nn.Module):
    """The base class of ops: maps tensors, and the spec of its input to ``output``."""

    output: Spec
    padding = 0  # entities that it appends to a list


class Cast(Op):
    """Convert to another type; choices become numbers, which are not one-hot encoded."""

    def __init__(self, spec: Spec, *, dtype: str) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f'dtype is "{dtype}", but must be one of {", ".join(DTYPES)}')
        self._dtype = DTYPES[dtype]
        low, high = spec.low, spec.high
        if spec.kind != "continuous":
            low, high = 0.0, float(max(spec.choices) - 1)
        elif dtype == "uint8" and not 0 <= spec.bounds[0].min() <= spec.bounds[1].max() < 256:
            raise ValueError("its numbers are not all from 0 to 255, and others would wrap around; put clip before it")
        self.output = replace(spec, dtype=dtype, kind="continuous", low=low, high=high, sizes=())

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self._dtype)


class Scale(Op):
    """Multiply by ``by`` and add ``offset``."""

    def __init__(self, spec: Spec, *, by: float, offset: float = 0.0) -> None:
        super().__init__()
        _refuse_choices(spec)
        _check_numbers(by=by, offset=offset)
        if by == 0:
            raise ValueError("by is 0, which would make all numbers equal")
        self._by, self._offset = float(by), float(offset)
        self.output = _numbers(spec, *(bound * by + offset for bound in spec.bounds))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self._by + self._offset


class Clip(Op):
    """Limit numbers to the range from ``low`` to ``high``."""

    def __init__(self, spec: Spec, *, low: float, high: float) -> None:
        super().__init__()
        _refuse_choices(spec)
        _check_numbers(low=low, high=high)
        if low >= high:
            raise ValueError(f"low is {low:g} and high is {high:g}, but low must be less than high")
        self._low, self._high = float(low), float(high)
        self.output = _numbers(spec, *(np.clip(bound, low, high) for bound in spec.bounds))

    def forward(self, x: Tensor) -> Tensor:
        return x.float().clamp(self._low, self._high)


class Symlog(Op):
    """Compress numbers of any scale: sign(x) · log(1 + |x|)."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        _refuse_choices(spec)
        self.output = _numbers(spec, *(np.sign(bound) * np.log1p(np.abs(bound)) for bound in spec.bounds))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x.sign() * x.abs().log1p()


class Sign(Op):
    """Keep the sign of numbers alone: −1, 0 or 1."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        _refuse_choices(spec)
        self.output = _numbers(spec, *(np.sign(bound) for bound in spec.bounds))

    def forward(self, x: Tensor) -> Tensor:
        return x.float().sign()


class ToChoices(Op):
    """Take whole numbers for choices 0 to ``size`` − 1, which are one-hot encoded; ``size`` 0: by the upper bound."""

    def __init__(self, spec: Spec, *, size: int = 0) -> None:
        super().__init__()
        if size < 0:
            raise ValueError(f"size is {size}, but must be a whole number of 1 or more")
        if spec.kind != "continuous":
            raise ValueError("it is one-hot encoded already" if spec.kind == "categorical" else "it is 0 or 1 already")
        low, high = (float(limit) for limit in (spec.bounds[0].min(), spec.bounds[1].max()))
        if not size and (not isfinite(high) or low < 0):
            raise ValueError("its Box is not from 0 to a number, so give the number of choices, as in one_hot(size=10)")
        self._last = (int(size) or int(high) + 1) - 1
        sizes = (self._last + 1,) * spec.size
        self.output = Spec(spec.shape, "int64", "categorical", sizes=sizes)

    def forward(self, x: Tensor) -> Tensor:
        return x.round().long().clamp(0, self._last)


class Flatten(Op):
    """Join all dimensions into one, ``[*shape]`` → ``[prod(shape)]``."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self._rank = len(spec.shape)
        self.output = replace(spec, shape=(prod(spec.shape),), stack=1)

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1) if self._rank == 0 else x.flatten(-self._rank)


class ChannelsFirst(Op):
    """Move the channels of an image first, ``[H, W, C]`` → ``[C, H, W]``, where the shape does not show them."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        if len(spec.shape) != 3:
            raise ValueError("it takes images [H, W, C]")
        order = (*range(len(spec.shape) - 3), -1, -3, -2)
        low, high = (np.transpose(bound, order) for bound in spec.bounds)
        self.output = replace(_with_bounds(spec, low, high), shape=low.shape)

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, -3)


class Pad(Op):
    """Append zeros up to a shape, as in ``pad(shape=[10, 4])``; a list gets a mask of its entities."""

    def __init__(self, spec: Spec, *, shape: tuple[int, ...]) -> None:
        super().__init__()
        _refuse_choices(spec)
        if len(shape) != len(spec.shape) or any(new < old for new, old in zip(shape, spec.shape, strict=True)):
            raise ValueError(f"it cannot be padded to {list(shape)}; give as many sizes, none of them smaller")
        self._more = [n for new, old in zip(reversed(shape), reversed(spec.shape), strict=True) for n in (0, new - old)]
        self.padding = shape[0] - spec.shape[0] if spec.axes == "entities" else 0
        low, high = (float(limit) for limit in (spec.bounds[0].min(), spec.bounds[1].max()))
        self.output = replace(spec, shape=tuple(shape), low=min(low, 0.0), high=max(high, 0.0), stack=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, self._more)


class Rename(Op):
    """Give the observation another name for the networks."""

    def __init__(self, spec: Spec, *, to: str) -> None:
        super().__init__()
        self.to_name, self.output = _name(to), spec

    def forward(self, x: Tensor) -> Tensor:
        return x


class Concat(Rename):
    """Join vectors into one, under a common name, in the order of the observations."""

    def __init__(self, spec: Spec, *, to: str) -> None:
        super().__init__(spec, to=to)
        if len(spec.shape) > 1:
            raise ValueError("it joins vectors; put flatten before it")


class Drop(Op):
    """Leave the observation out: networks do not see it."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.output = spec

    def forward(self, x: Tensor) -> Tensor:
        return x


def _refuse_choices(spec: Spec) -> None:
    if spec.kind == "categorical":
        raise ValueError('it is a choice and not a number; put cast(dtype="float32") before it to take it for one')


def _check_numbers(**arguments: Any) -> None:
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ValueError(f"{name} is {value!r}, but must be a number")


def _name(to: Any) -> str:
    if not isinstance(to, str) or not to.strip():
        raise ValueError('give the new name in quotes, as in to="state"')
    return to


def _numbers(spec: Spec, low: Any, high: Any) -> Spec:
    """Return the spec of float32 numbers between two bounds."""
    return _with_bounds(replace(spec, dtype="float32", kind="continuous"), np.minimum(low, high), np.maximum(low, high))


def _with_bounds(spec: Spec, low: Any, high: Any) -> Spec:
    return replace(spec, low=_bound(low), high=_bound(high))


def _bound(bound: Any) -> float | tuple[float, ...]:
    values = np.asarray(bound, np.float64).ravel()
    return float(values[0]) if (values == values[0]).all() else tuple(values.tolist())
