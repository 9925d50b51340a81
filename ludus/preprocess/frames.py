"""Ops on images that run in the environment's process, before anything is sent or stored. Imports no torch.

A constructor takes the spec of its input and the arguments of the setting, as in ops.py; ``apply`` maps one
observation.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.core.spec import Spec, is_channels_last

Array = NDArray[Any]


class Grayscale:
    """Turn a colour image ``[H, W, 3]`` or ``[3, H, W]`` into a grey one ``[H, W]`` (ITU-R BT.601)."""

    def __init__(self, spec: Spec) -> None:
        colour = spec.kind == "continuous" and len(spec.shape) == 3
        self._first = colour and not is_channels_last(spec.shape)
        if not colour or spec.shape[0 if self._first else -1] != 3:
            raise ValueError("it takes colour images [H, W, 3] or [3, H, W]")
        _check_dtype(spec, "uint8", "uint16", "float32")
        self._cv2 = _opencv("grayscale")
        self.output = _image(spec, spec.shape[1:] if self._first else spec.shape[:2])

    def apply(self, x: Array) -> Array:
        """Return the grey image."""
        image = _channels_last(x) if self._first else x
        return np.asarray(self._cv2.cvtColor(image, self._cv2.COLOR_RGB2GRAY))


class Resize:
    """Resize an image to ``height`` × ``width``.

    ``area`` takes the mean over the area of each new pixel, and interpolates linearly where a side grows; ``nearest``
    takes one old pixel, as for maps of codes.
    """

    def __init__(self, spec: Spec, *, height: int, width: int, method: str = "area") -> None:
        _check_sizes(height=height, width=width)
        if method not in ("area", "nearest"):
            raise ValueError(f'method is "{method}", but must be area or nearest')
        self._first, old = _plane(spec)
        self._size = (width, height)
        self.output = _image(spec, _replaced(spec.shape, self._first, (height, width)))
        self._nearest = [
            ((np.arange(new) + 0.5) * n / new).astype(np.int64) for n, new in zip(old, (height, width), strict=True)
        ]
        self._cv2: Any = None
        if method == "area":
            _check_dtype(spec, "uint8", "uint16", "int16", "float32", "float64")
            self._cv2 = _opencv("resize")

    def apply(self, x: Array) -> Array:
        """Return the image in its new size."""
        if self._cv2 is None:
            return x.take(self._nearest[0], self._first).take(self._nearest[1], self._first + 1)
        image = _channels_last(x) if self._first else x
        y = np.asarray(self._cv2.resize(image, self._size, interpolation=self._cv2.INTER_AREA))
        if self._first:
            y = np.moveaxis(y.reshape(*y.shape[:2], -1), -1, 0)
        return y.reshape(self.output.shape)  # OpenCV drops a single channel


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
        return np.asarray(np.rint(np.clip(x, 0, 1) * 255), np.uint8)


def _opencv(op: str) -> Any:
    try:
        return import_module("cv2")
    except ImportError as error:
        raise UserError(
            f"preprocess.observation has {op}, which needs OpenCV, but it is not installed: pip install "
            "opencv-python-headless."
        ) from error


def _check_dtype(spec: Spec, *dtypes: str) -> None:
    if spec.dtype not in dtypes:
        raise ValueError(f"it takes images of {', '.join(dtypes[:-1])} or {dtypes[-1]}")


def _channels_last(x: Array) -> Array:
    """Return an image ``[C, H, W]`` as OpenCV takes it."""
    return np.ascontiguousarray(np.moveaxis(x, 0, -1))


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


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}, but must be a whole number above 0")
