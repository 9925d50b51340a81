"""What a tensor is: shape, dtype and meaning. Needs numpy alone, so that environment processes stay small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["continuous", "categorical", "binary"]
# an observation of this name (or action_mask/<action name>) marks the allowed choices: one entry per choice of every
# element; a bit has two, whether it may be 0 and whether it may be 1
MASK = "action_mask"


@dataclass(frozen=True)
class Spec:
    """One named observation or action of one environment, without time and batch dimensions.

    ``continuous``: real numbers between ``low`` and ``high`` (one number, or one per element in C order).
    ``categorical``: each element is one of ``sizes[i]`` choices, counted from 0; a Discrete has shape ``()``.
    ``binary``: each element is 0 or 1.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "continuous"
    low: float | tuple[float, ...] = -np.inf
    high: float | tuple[float, ...] = np.inf
    sizes: tuple[int, ...] = ()  # categorical: the number of choices of each element, in C order
    stack: int = 1  # how many frames the leading dimension holds, when frames are stacked

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def choices(self) -> tuple[int, ...]:
        """How many choices each element of a discrete action has: ``sizes``, or 2 for every bit."""
        return (2,) * self.size if self.kind == "binary" else self.sizes

    @property
    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``low`` and ``high`` as arrays of the spec's shape."""
        low, high = (
            np.broadcast_to(np.asarray(x, np.float64).reshape(self._bound_shape(x)), self.shape)
            for x in (self.low, self.high)
        )
        return low, high

    @property
    def bounded(self) -> NDArray[np.bool_]:
        """Which elements have two finite bounds."""
        low, high = self.bounds
        return np.isfinite(low) & np.isfinite(high)

    def _bound_shape(self, bound: float | tuple[float, ...]) -> tuple[int, ...]:
        return self.shape if isinstance(bound, tuple) else ()


Specs = dict[str, Spec]


def is_mask(name: str) -> bool:
    """Whether an observation of this name is an action mask and no input to a network."""
    return name == MASK or name.startswith(MASK + "/")


def mask_name(action: str, actions: Specs) -> str:
    """The observation that masks ``action``: ``action_mask``, or ``action_mask/<name>`` if there are several."""
    return MASK if len(actions) == 1 else f"{MASK}/{action}"


def network_inputs(observation: Specs) -> Specs:
    """The observations that a network sees: all but the masks."""
    return {name: spec for name, spec in observation.items() if not is_mask(name)}
