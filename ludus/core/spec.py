"""Specs of observations and actions. Imports no torch, so environment processes stay small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["continuous", "categorical", "binary"]
# an observation with this name (or action_mask/<action name>) is 1 for allowed choices: one entry per choice of each
# element; a binary element has two, for 0 and 1
MASK = "action_mask"


@dataclass(frozen=True)
class Spec:
    """An observation or action of one environment, without time and batch dimensions.

    ``continuous``: between ``low`` and ``high`` (one number, or one per element in C order). ``categorical``: element
    i is one of ``sizes[i]`` choices, counted from 0; a Discrete has shape ``()``. ``binary``: each element is 0 or 1.
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


Specs = dict[str, Spec]


def is_mask(name: str) -> bool:
    """Return whether an observation is an action mask, which networks do not see."""
    return name == MASK or name.startswith(MASK + "/")


def mask_name(action: str, actions: Specs) -> str:
    """Return the name of the mask of ``action``: ``action_mask``, or ``action_mask/<name>`` if there are several."""
    return MASK if len(actions) == 1 else f"{MASK}/{action}"


def network_inputs(observation: Specs) -> Specs:
    """Return the observations that a network sees: all except action masks."""
    return {name: spec for name, spec in observation.items() if not is_mask(name)}
