"""From the policy's actions to the environment's, on the environment's side. Needs numpy alone."""

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
    """Turns policy-space actions into the environment's by the action_transform declared for each name.

    ``clip``: clipped to [−1, 1], then rescaled to the Box; elements without two finite bounds are not rescaled, only
    clipped to the bound that they have. ``tanh``: squashed, then rescaled. ``unit``: from [0, 1] to the Box. ``none``:
    as it is.
    """

    def __init__(self, specs: Specs, action_transform: Mapping[str, str]) -> None:
        unknown = [name for name in action_transform if name not in specs]
        if unknown:
            raise UserError(
                f'There is no action "{unknown[0]}" to transform; the environment has {", ".join(specs)}.'
                f"{did_you_mean(unknown[0], specs)}"
            )
        chosen = {name: _function(name, spec, action_transform.get(name, "none")) for name, spec in specs.items()}
        self._functions = {name: function for name, function in chosen.items() if function is not None}

    def __call__(self, actions: dict[str, Array]) -> dict[str, Array]:
        """Transform a batch of actions, ``[B, …]`` by name."""
        if not self._functions:
            return actions
        functions = self._functions
        return {name: functions[name](x) if name in functions else x for name, x in actions.items()}


def _function(name: str, spec: Spec, transform: str) -> Callable[[Array], Array] | None:
    if transform not in TRANSFORMS:
        known = ", ".join(TRANSFORMS)
        raise UserError(
            f'Action "{name}": unknown action_transform "{transform}"; choose one of {known}.'
            f"{did_you_mean(transform, TRANSFORMS)}"
        )
    if transform == "none":
        return None
    if spec.kind != "continuous":
        raise UserError(f'Action "{name}" is {spec.kind}: its action_transform is "none", not "{transform}".')
    if transform != "clip" and not spec.bounded.all():
        raise UserError(
            f'Action "{name}" has elements without two finite bounds, which "{transform}" cannot rescale to; give the '
            "Box finite bounds, or set agent.distribution to gaussian."
        )
    return {"clip": _clip, "tanh": _tanh, "unit": _unit}[transform](spec)


def rescaling(spec: Spec) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scale and shift from [−1, 1] to the Box; 1 and 0 for elements without two finite bounds."""
    return np.where(spec.bounded, _half(spec), 1.0), np.where(spec.bounded, _middle(spec), 0.0)


def _clip(spec: Spec) -> Callable[[Array], Array]:
    low, high = spec.bounds
    bounded = spec.bounded
    scale, shift = rescaling(spec)
    least, most = np.where(bounded, -1.0, low), np.where(bounded, 1.0, high)
    finish = _finish(spec)
    return lambda x: finish(np.clip(x, least, most) * scale + shift)


def _tanh(spec: Spec) -> Callable[[Array], Array]:
    scale, shift, finish = _half(spec), _middle(spec), _finish(spec)
    return lambda x: finish(np.tanh(x, dtype=np.float64) * scale + shift)


def _unit(spec: Spec) -> Callable[[Array], Array]:
    low, high = spec.bounds
    scale, finish = high - low, _finish(spec)
    return lambda x: finish(np.clip(x, 0.0, 1.0) * scale + low)


def _half(spec: Spec) -> NDArray[np.float64]:
    low, high = _finite(spec)
    return high / 2 - low / 2


def _middle(spec: Spec) -> NDArray[np.float64]:
    low, high = _finite(spec)
    return high / 2 + low / 2


def _finite(spec: Spec) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    low, high = spec.bounds
    return np.where(spec.bounded, low, 0.0), np.where(spec.bounded, high, 0.0)


def _finish(spec: Spec) -> Callable[[Array], Array]:
    """Undo what rounding does at the bounds, and give the environment its own type."""
    low, high = spec.bounds
    dtype = np.dtype(spec.dtype)
    if np.issubdtype(dtype, np.integer):
        return lambda x: np.rint(np.clip(x, low, high)).astype(dtype)
    return lambda x: np.clip(x, low, high).astype(dtype, copy=False)
