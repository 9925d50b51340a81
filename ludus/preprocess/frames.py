"""Ops on images that run in the environment's process, before anything is sent or stored. Imports no torch.

A constructor takes the spec of its input and the arguments of the setting, as in ops.py; ``apply`` maps one
observation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.spec import Spec, is_channels_last

Array = NDArray[Any]
LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # weights of red, green and blue in a grey value (ITU-R BT.601)


class Grayscale:
    """Turn a colour image ``[H, W, 3]`` or ``[3, H, W]`` into a grey one ``[H, W]``."""

    def __init__(self, spec: Spec) -> None:
        channel = _channel_axis(spec)
        if channel is None or spec.shape[channel] != 3:
            raise ValueError("it takes images with three channels")
        self._channel = channel
        shape = spec.shape[:2] if channel == -1 else spec.shape[1:]
        self.output = _image(spec, shape)

    def apply(self, x: Array) -> Array:
        """Return the grey image."""
        return _round(np.tensordot(x, LUMA, (self._channel, 0)), x.dtype)


class Resize:
    """Resize an image to ``height`` × ``width``.

    ``area`` takes the mean over the area of each new pixel; ``nearest`` one old pixel, as for maps of codes.
    """

    def __init__(self, spec: Spec, *, height: int, width: int, method: str = "area") -> None:
        _check_sizes(height=height, width=width)
        if method not in ("area", "nearest"):
            raise ValueError(f'method is "{method}", but must be area or nearest')
        self._first, old = _plane(spec)
        self.output = _image(spec, _replaced(spec.shape, self._first, (height, width)))
        sizes = tuple(zip(old, (height, width), strict=True))
        self._nearest = [((np.arange(new) + 0.5) * n / new).astype(np.int64) for n, new in sizes]
        self._weights = [_area_weights(n, new) for n, new in sizes] if method == "area" else []

    def apply(self, x: Array) -> Array:
        """Return the image in its new size."""
        if not self._weights:
            return x.take(self._nearest[0], self._first).take(self._nearest[1], self._first + 1)
        rows, columns = self._weights
        if self._first == 0 and x.ndim == 3:  # channels last: two multiplications of matrices
            height, width, channels = x.shape
            y = (rows @ x.reshape(height, width * channels).astype(np.float32)).reshape(-1, width, channels)
            return _round(np.einsum("wv,hvc->hwc", columns, y, optimize=True), x.dtype)
        return _round(rows @ x.astype(np.float32) @ columns.T, x.dtype)


class Crop:
    """Cut out ``height`` × ``width`` pixels from row ``top`` and column ``left`` on."""

    def __init__(self, spec: Spec, *, height: int, width: int, top: int = 0, left: int = 0) -> None:
        _check_sizes(height=height, width=width)
        first, (rows, columns) = _plane(spec)
        if min(top, left) < 0 or top + height > rows or left + width > columns:
            raise ValueError(f"rows {top} to {top + height} and columns {left} to {left + width} are not all in it")
        self._part = (*(slice(None),) * first, slice(top, top + height), slice(left, left + width))
        self.output = _image(spec, _replaced(spec.shape, first, (height, width)))

    def apply(self, x: Array) -> Array:
        """Return the part."""
        return x[self._part]


class Compress:
    """Store an image of floats from 0 to 1 in bytes; the device scales it back."""

    def __init__(self, spec: Spec) -> None:
        low, high = spec.bounds
        if not np.issubdtype(spec.dtype, np.floating) or low.min() < 0 or high.max() > 1:
            raise ValueError("it takes floats from 0 to 1")
        _plane(spec)
        self.output = Spec(spec.shape, "uint8", low=0.0, high=255.0)

    def apply(self, x: Array) -> Array:
        """Return the image in bytes."""
        return _round(np.clip(x, 0, 1) * 255, np.dtype(np.uint8))


class Stack:
    """Stack the last ``n`` observations, the oldest first; an episode starts with ``n`` times its first one."""

    def __init__(self, spec: Spec, *, n: int) -> None:
        _check_sizes(n=n)
        if n < 2:
            raise ValueError("n is 1, which stacks nothing")
        if spec.kind != "continuous":
            raise ValueError("it stacks numbers")
        low, high = (np.broadcast_to(bound, (n, *spec.shape)) for bound in spec.bounds)
        self.frames = n
        self.output = replace(_bounded(spec, low, high), shape=(n, *spec.shape), stack=n, axes=None)

    def begin(self, x: Array) -> Array:
        """Return the stack of an episode's first observation."""
        return np.repeat(np.asarray(x)[None], self.frames, 0)

    def push(self, stack: Array, x: Array) -> Array:
        """Return a new stack with the next observation."""
        return np.concatenate([stack[1:], np.asarray(x)[None]])


def _area_weights(old: int, new: int) -> NDArray[np.float32]:
    """Return the share ``[new, old]`` of each old pixel in each new one."""
    edges = np.linspace(0, old, new + 1)
    left, right = edges[:-1, None], edges[1:, None]
    start = np.arange(old)
    overlap = np.clip(np.minimum(right, start + 1) - np.maximum(left, start), 0, None)
    return np.asarray(overlap * new / old, np.float32)


def _round(x: Array, dtype: np.dtype[Any]) -> Array:
    return np.rint(x).astype(dtype) if np.issubdtype(dtype, np.integer) else x.astype(dtype, copy=False)


def _channel_axis(spec: Spec) -> int | None:
    """Return the axis of an image's channels, -1 or 0; None for a grey image ``[H, W]``."""
    if spec.kind != "continuous" or len(spec.shape) not in (2, 3):
        raise ValueError("it takes images [H, W], [H, W, C] or [C, H, W]")
    if len(spec.shape) == 2:
        return None
    return -1 if is_channels_last(spec.shape) else 0


def _plane(spec: Spec) -> tuple[int, tuple[int, int]]:
    """Return the axis of an image's rows, which that of its columns follows, and their sizes."""
    first = 1 if _channel_axis(spec) == 0 else 0
    return first, (spec.shape[first], spec.shape[first + 1])


def _replaced(shape: tuple[int, ...], first: int, sizes: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:first], *sizes, *shape[first + 2 :])


def _image(spec: Spec, shape: tuple[int, ...]) -> Spec:
    """Return the spec of a part or a mean of pixels."""
    low, high = (float(limit) for limit in (spec.bounds[0].min(), spec.bounds[1].max()))
    return Spec(shape, spec.dtype, low=low, high=high)


def _bounded(spec: Spec, low: Array, high: Array) -> Spec:
    bounds = [
        float(x.flat[0]) if (x == x.flat[0]).all() else tuple(x.astype(np.float64).ravel().tolist())
        for x in (low, high)
    ]
    return replace(spec, low=bounds[0], high=bounds[1])


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}, but must be a whole number above 0")
