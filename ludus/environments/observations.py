"""Read observations, with the action masks among them, into named arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from gymnasium import spaces

from ludus.core.errors import UserError, did_you_mean
from ludus.core.spec import Axes, Specs, axes_problem, is_mask
from ludus.environments.config import DEFAULTS, EnvConfig, parse_axes, parse_lengths
from ludus.environments.masks import ActionMasks
from ludus.environments.spaces import Array, Arrays, Layout


class ObservationReader:
    """Reads observation and info of an environment, or a batch of them, into named arrays, including masks.

    ``info`` is that of a reset, which shows whether it has the masks. ``frames`` returns the number of stacked
    frames of an image by its name. Of ``config``, the settings ``mask``, ``axes``, ``max_length`` and ``lengths`` are
    used.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        actions: Specs,
        config: EnvConfig,
        info: Mapping[str, Any],
        environment: str,
        frames: Callable[[str], int] = lambda _: 1,
    ) -> None:
        self.mask_key, mask_space, self._environment = config.mask, None, environment
        if config.mask and isinstance(space, spaces.Dict) and config.mask in space.spaces:
            rest = dict(space.spaces)
            mask_space = rest.pop(config.mask)
            if not rest:
                raise UserError(
                    f'{environment}: the observation has nothing but the mask "{config.mask}"; add something to '
                    "observe."
                )
            space = spaces.Dict(rest)
        lengths = parse_lengths(config.lengths)
        self.layout = Layout(space, "observation", environment, config.max_length, lengths)
        # the links of edges have the length of the edges
        masked = [spec.masks for spec in self.layout.specs.values() if spec.masks is not None]
        lists = [name for name in masked if not name.endswith("/edge_links")]
        if unknown := [name for name in lengths if name not in lists]:
            raise UserError(
                f'env.lengths names "{unknown[0]}", but the lists of variable length of {environment} are '
                f"{', '.join(lists) or 'none'}.{did_you_mean(unknown[0], lists)}"
            )
        if config.max_length != DEFAULTS.max_length and not self.layout.padded:
            raise UserError(
                f"env.max_length is {config.max_length}, but no observation of {environment} is a Sequence, Graph or "
                "OneOf; leave it out."
            )
        example = info.get(config.mask) if mask_space is None else mask_space.sample()
        self.masks = ActionMasks(actions, example, environment) if example is not None and config.mask else None
        self.mask_in_info = self.masks is not None and mask_space is None
        own: Specs = {}
        for name, spec in self.layout.specs.items():
            if is_mask(name):
                raise UserError(
                    f'{environment}: the name of observation "{name}" is reserved for masks; rename it, or set '
                    "env.mask to its key if it is a mask."
                )
            stacked = (n := frames(name)) > 1 and len(spec.shape) >= 3 and spec.shape[0] % n == 0
            own[name] = replace(spec, stack=n, axes=None) if stacked else spec
        for name, spec in own.items():  # a MultiBinary with an entry per entity marks padding
            mask = own.get(f"{name}/mask")
            if mask is not None and mask.kind == "binary" and spec.axes == "entities" and mask.shape == spec.shape[:1]:
                own[f"{name}/mask"] = replace(mask, masks=name)
        own = override_axes(own, config.axes, environment)
        self.specs: Specs = {**own, **(self.masks.specs if self.masks else {})}
        # choices of each element of categorical observations; padded ones are checked while they are padded
        self.sizes = {
            name: spec.sizes[0] if len(set(spec.sizes)) == 1 else np.reshape(spec.sizes, spec.shape)
            for name, spec in own.items()
            if name in self.layout.leaves and spec.kind == "categorical"
        }
        if self.masks and mask_space is not None:
            self.masks.read(example)  # refuses a wrong length before training

    def read(self, observation: Any, info: Mapping[str, Any], batch: tuple[int, ...] = ()) -> Arrays:
        """Return the named arrays, ``[*batch, …]``."""
        arrays = self.layout.flatten(observation, bool(batch))
        if self.masks is not None:
            tree = info.get(self.mask_key) if self.mask_in_info else observation[self.mask_key]
            if tree is None:
                raise UserError(
                    f'{self._environment}: info had the mask "{self.mask_key}" at the first reset but lacks it now; '
                    "give it at every reset and step."
                )
            arrays.update(self.masks.read(tree, batch))
        return arrays

    def check(self, arrays: Mapping[str, Array], ended: Sequence[bool] | Array, start: int = 0) -> None:
        """Check the choices and masks of environments ``[B, …]``, from number ``start`` on; see ``resolve_empty``."""
        if self.sizes:
            self.check_choices(arrays)
        if self.masks is not None:
            self.masks.resolve_empty(arrays, np.asarray(ended), start)

    def check_choices(self, arrays: Mapping[str, Array]) -> None:
        """Refuse choices outside of the space, which have no one-hot vector and no embedding."""
        for name, sizes in self.sizes.items():
            if (x := arrays.get(name)) is None:
                continue
            wrong = (x < 0) | (x >= sizes)
            if np.count_nonzero(wrong):
                raise UserError(
                    f'{self._environment}: observation "{name}" has the choice {x[wrong].flat[0]} (counted from 0), '
                    f"but its space has {sizes}; widen the space or fix the value."
                )


def override_axes(specs: Specs, setting: Iterable[str], environment: str) -> Specs:
    """Apply the setting ``env.axes``."""
    axes, known = parse_axes(setting), [name for name, spec in specs.items() if spec.masks is None]
    for name, wanted in axes.items():
        if name not in known:
            raise UserError(
                f'env.axes names "{name}", but the observations of {environment} are {", ".join(known)}.'
                f"{did_you_mean(name, known)}"
            )
        if problem := axes_problem(specs[name], wanted):
            possible = (other for other in get_args(Axes) if not axes_problem(specs[name], other))
            raise UserError(
                f'env.axes lays "{name}" out as {wanted}, but the observation {problem} (shape {specs[name].shape}); '
                f"leave it out, or choose {' or '.join(possible)}."
            )
    return {name: replace(spec, axes=axes[name]) if name in axes else spec for name, spec in specs.items()}
