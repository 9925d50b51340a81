"""Specs of observations and actions. Imports no torch, so environment processes stay small."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["continuous", "categorical", "binary"]
# how an observation is laid out: entities are [N, F], an image [H, W] or with channels, a grid one choice per cell, a
# clip a movie or volume
Axes = Literal["vector", "entities", "image", "grid", "clip"]
CHANNELS = (1, 3, 4)  # sizes of a dimension of an image that are taken for channels
# an observation with this name (or action_mask/<action name>) is 1 for allowed choices: one entry per choice of each
# element; a binary element has two, for 0 and 1
MASK = "action_mask"


@dataclass(frozen=True)
class Spec:
    """An observation or action of one environment, without time and batch dimensions.

    ``continuous``: between ``low`` and ``high`` (one number, or one per element in C order). ``categorical``: element
    i is one of ``sizes[i]`` choices, counted from 0; a Discrete has shape ``()``. ``binary``: each element is 0 or 1.

    ``axes`` says how networks get an observation (preprocess/observation.py); by default it follows from kind, rank and
    dtype (``default_axes``).
    """

    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "continuous"
    low: float | tuple[float, ...] = -np.inf
    high: float | tuple[float, ...] = np.inf
    sizes: tuple[int, ...] = ()  # categorical: the number of choices of each element, in C order
    stack: int = 1  # number of stacked frames in the leading dimension
    # an observation's ops on the device, before the network: preprocess.observation without those of the environment
    ops: tuple[str, ...] = ()
    axes: Axes | None = None  # None: the default, which the constructor fills in
    masks: str | None = None  # name of the list of which this observation ``[N]`` marks the entries that are no padding
    # several agents: the one whose reward or status this observation is (environments/multiagent.py), which networks do
    # not see
    result_of: str = ""

    def __post_init__(self) -> None:
        if self.axes is None:
            object.__setattr__(self, "axes", default_axes(self))

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def choices(self) -> tuple[int, ...]:
        """The number of choices of each element of a discrete action; 2 if binary."""
        return (2,) * self.size if self.kind == "binary" else self.sizes

    @property
    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``low`` and ``high`` as arrays of the spec's shape."""
        low, high = (
            np.broadcast_to(np.asarray(x, np.float64).reshape(self.shape if isinstance(x, tuple) else ()), self.shape)
            for x in (self.low, self.high)
        )
        return low, high

    @property
    def bounded(self) -> NDArray[np.bool_]:
        """Which elements have finite bounds."""
        low, high = self.bounds
        return np.isfinite(low) & np.isfinite(high)

    @property
    def holds_pixels(self) -> bool:
        """Whether this is an image, or a part of one, in bytes of 0 to 255."""
        return self.kind == "continuous" and self.dtype == "uint8" and len(self.shape) >= 2 and self.high == 255

    @property
    def holds_stack(self) -> bool:
        """Whether this is a stack ``[S, H, W, C]`` or ``[S, C, H, W]`` of images, which becomes one image."""
        if not self.holds_pixels or len(self.shape) != 4 or not 1 < self.stack == self.shape[0]:
            return False
        return is_channels_last(self.shape[1:]) or self.shape[1] <= max(CHANNELS)


def default_axes(spec: Spec) -> Axes:
    """Return how an observation is laid out, judging by its kind, rank and dtype."""
    rank = len(spec.shape)
    if spec.kind == "categorical":
        return "grid" if rank in (2, 3) and len(set(spec.sizes)) == 1 else "vector"
    if rank < 2:
        return "vector"
    if rank == 2:
        return "image" if spec.holds_pixels else "entities"
    return "image" if rank == 3 or spec.holds_stack else "clip"


def axes_problem(spec: Spec, axes: Axes) -> str:
    """Return why an observation cannot be laid out as ``axes``; "" if it can."""
    rank, categorical = len(spec.shape), spec.kind == "categorical"
    ranks = {
        "vector": range(99),
        "entities": range(1, 3) if categorical else range(2, 3),
        "image": range(2, 5) if spec.holds_stack else range(2, 4),
        "grid": range(1, 4),
        "clip": range(3, 5),
    }[axes]
    if rank not in ranks:
        return f"has rank {rank}, not {' or '.join(map(str, ranks))}"
    if categorical != (axes == "grid") and axes not in ("vector", "entities"):
        return f"is {spec.kind}"
    if axes == "grid" and len(set(spec.sizes)) > 1:
        return "has elements with different numbers of choices"
    if axes == "entities" and categorical and spec.sizes != spec.sizes[: spec.size // spec.shape[0]] * spec.shape[0]:
        return "has entities with different numbers of choices"
    return ""


def is_channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether ``shape`` is that of an image ``[H, W, C]``."""
    if len(shape) != 3:
        return False
    height, width, channels = shape
    return channels in CHANNELS and height not in CHANNELS and min(height, width) > channels


Specs = dict[str, Spec]


def is_mask(name: str) -> bool:
    """Return whether an observation is an action mask, which networks do not see."""
    return name == MASK or name.startswith(MASK + "/")


def mask_name(action: str, actions: Specs, given: str = "") -> str:
    """Return the name of the mask of ``action``: ``action_mask``, or ``action_mask/<name>`` if there are several.

    One that depends on the choice of the action ``given`` is called ``action_mask/<name>|<given>`` and has one row for
    each of its choices.
    """
    if given:
        return f"{MASK}/{action}|{given}"
    return MASK if len(actions) == 1 else f"{MASK}/{action}"


def mask_condition(action: str, actions: Specs, observation: Container[str]) -> str:
    """Return the action on whose choice the mask of ``action`` depends; "" if there is no such mask."""
    return next((other for other in actions if mask_name(action, actions, other) in observation), "")


def network_inputs(observation: Specs) -> Specs:
    """Return the observations that a network gets: all except action masks and the results of single agents."""
    return {name: spec for name, spec in observation.items() if not (is_mask(name) or spec.result_of)}


def is_one_discrete(action: Specs) -> bool:
    """Return whether the action is a single Discrete."""
    return [(spec.kind, spec.shape) for spec in action.values()] == [("categorical", ())]
