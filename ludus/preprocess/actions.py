"""Map policy actions to the environment's. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.errors import UserError, did_you_mean
from ludus.core.spec import Spec, Specs

Array = NDArray[Any]
TRANSFORMS = ("clip", "tanh", "unit", "none")


class ActionPreprocessor:
    """Maps policy actions to the environment's, by the action_transform of each action.

    ``clip``: clip to [−1, 1] and rescale to the Box; elements without finite bounds are only clipped. ``tanh``: squash
    and rescale. ``unit``: rescale from [0, 1]. ``none``: no change.
    """

    def __init__(self, specs: Specs, action_transform: Mapping[str, str]) -> None:
        unknown = [name for name in action_transform if name not in specs]
        if unknown:
            raise UserError(
                f'action_transform names "{unknown[0]}", but the actions are {", ".join(specs)}.'
                f"{did_you_mean(unknown[0], specs)}"
            )
        functions = {name: _make(name, spec, action_transform.get(name, "none")) for name, spec in specs.items()}
        self._functions = {name: function for name, function in functions.items() if function is not None}

    def __call__(self, actions: dict[str, Array]) -> dict[str, Array]:
        """Transform a batch of actions, ``[B, …]`` by name."""
        return actions | {name: function(actions[name]) for name, function in self._functions.items()}


def _make(name: str, spec: Spec, transform: str) -> Callable[[Array], Array] | None:
    if transform not in TRANSFORMS:
        raise UserError(
            f'Action "{name}": unknown action_transform "{transform}"; choose one of {", ".join(TRANSFORMS)}.'
            f"{did_you_mean(transform, TRANSFORMS)}"
        )
    if transform == "none":
        return None
    if spec.kind != "continuous":
        raise UserError(f'Action "{name}" is {spec.kind}: its action_transform must be "none", not "{transform}".')
    if transform != "clip" and not spec.bounded.all():
        raise UserError(
            f'Action "{name}" has infinite bounds, to which "{transform}" cannot rescale; give the Box finite bounds '
            "or set agent.distribution to gaussian."
        )
    (low, high), (scale, shift), dtype = spec.bounds, rescaling(spec), np.dtype(spec.dtype)
    integers = np.issubdtype(dtype, np.integer)

    def cast(x: Array) -> Array:
        x = np.clip(x, low, high)  # rounding errors at the bounds
        return np.rint(x).astype(dtype) if integers else x.astype(dtype, copy=False)

    if transform == "tanh":
        return lambda x: cast(np.tanh(x, dtype=np.float64) * scale + shift)
    if transform == "unit":
        return lambda x: cast(np.clip(x, 0.0, 1.0) * (high - low) + low)
    lower, upper = np.where(spec.bounded, -1.0, low), np.where(spec.bounded, 1.0, high)
    return lambda x: cast(np.clip(x, lower, upper) * scale + shift)


def rescaling(spec: Spec) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scale and shift from [−1, 1] to the Box; 1 and 0 for elements without finite bounds."""
    low, high = (np.where(spec.bounded, bound, 0.0) for bound in spec.bounds)
    return np.where(spec.bounded, high / 2 - low / 2, 1.0), high / 2 + low / 2
