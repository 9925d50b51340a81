"""Map the environment's actions to policy space, for recorded actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ludus.core.spec import Spec, Specs
from ludus.preprocess.actions import ActionPreprocessor, Array, rescaling

# actions are clamped to this where the inverse of tanh, or the log-density of a Beta, is infinite at the bounds
INSIDE = 1 - 1e-6


class ActionInverter:
    """Maps the environment's actions to policy space, the inverse of ``ActionPreprocessor``, for recorded actions.

    Actions at or beyond the bounds of a Box become the largest that the policy can choose.
    """

    def __init__(self, specs: Specs, action_transform: Mapping[str, str]) -> None:
        ActionPreprocessor(specs, action_transform)  # refuses unknown names and transforms
        transforms = {name: action_transform.get(name, "none") for name in specs}
        self._functions = {name: _invert(specs[name], how) for name, how in transforms.items() if how != "none"}

    def __call__(self, actions: Mapping[str, Array]) -> dict[str, Array]:
        """Transform a batch of actions, ``[B, …]`` by name; continuous ones become float32."""
        return {**actions, **{name: function(actions[name]) for name, function in self._functions.items()}}


def _invert(spec: Spec, transform: str) -> Callable[[Array], Array]:
    scale, shift = rescaling(spec)
    scale = np.where(scale > 0, scale, 1.0)  # an element that can only have one value
    free = ~spec.bounded

    def to_unit_scale(x: Array) -> NDArray[np.float64]:
        scaled = (x.astype(np.float64) - shift) / scale
        return np.where(free, scaled, np.clip(scaled, -1.0, 1.0))

    if transform == "tanh":
        return lambda x: np.arctanh(np.clip(to_unit_scale(x), -INSIDE, INSIDE)).astype(np.float32)
    if transform == "unit":
        return lambda x: ((np.clip(to_unit_scale(x), -INSIDE, INSIDE) + 1) / 2).astype(np.float32)
    return lambda x: to_unit_scale(x).astype(np.float32)
