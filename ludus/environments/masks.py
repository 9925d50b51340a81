"""Read action masks and observations into named arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from gymnasium import spaces

from ludus.core.errors import UserError, did_you_mean
from ludus.core.spec import Axes, Spec, Specs, axes_problem, is_mask, mask_name
from ludus.environments.config import DEFAULTS, EnvConfig, parse_axes, parse_lengths
from ludus.environments.spaces import Array, Arrays, Layout


class ActionMasks:
    """Action masks as bool arrays, named by ``core.spec.mask_name``.

    The environment gives one array per discrete action (a dict or tuple of arrays if there are several actions). The
    mask of a MultiDiscrete is one array or a tuple with one per element. The mask of a MultiBinary of n bits has n
    entries (may the bit be 1?) or ``[n, 2]`` (may it be 0, may it be 1?) and is stored as the latter.

    A mask that depends on the choice of another action, a Discrete, is a dict of the name of that action and an array
    with one mask for each of its choices, such as ``{"target": {"function": array}}``.
    """

    def __init__(self, actions: Specs, example: Any, environment: str) -> None:
        self._environment, self._single = environment, len(actions) == 1
        self._actions = {n: s for n, s in actions.items() if s.choices and self._find(example, n) is not None}
        self._conditions = self._find_conditions(actions, example)  # action → the one that its mask depends on
        self._names = {name: mask_name(name, actions, self._conditions.get(name, "")) for name in self._actions}
        self._rows = {name: actions[other].sizes for name, other in self._conditions.items()}
        self.specs: Specs = {
            self._names[name]: Spec((*self._rows.get(name, ()), sum(s.choices)), "bool", "binary")
            for name, s in self._actions.items()
        }
        if example is not None and not self.specs:
            discrete = [name for name, spec in actions.items() if spec.choices]
            if discrete and not self._single:
                raise UserError(
                    f"{environment}: the action mask must be a dict with one array for each masked action, by name "
                    f"({', '.join(discrete)})."
                )
            raise UserError(
                f"{environment}: there is an action mask, but no discrete action that it belongs to; remove it, or set "
                "env.mask to another key."
            )
        if isinstance(example, Mapping) and not self._single:
            for key in example:  # vector environments add ``_key`` to mark the rows that have a key
                if not key.startswith("_") and not any(name == key or name.startswith(f"{key}/") for name in actions):
                    raise UserError(
                        f'{environment}: the action mask has a part "{key}", but there is no such action.'
                        f"{did_you_mean(str(key), actions)}"
                    )
        self._starts = {name: np.cumsum((0, *s.choices[:-1])) for name, s in self._actions.items()}

    def read(self, tree: Any, batch: tuple[int, ...] = ()) -> Arrays:
        """Return the masks in ``tree`` by name, ``[*batch, choices]``, or ``[*batch, n, choices]`` if conditional."""
        arrays: Arrays = {}
        for name in self._actions:
            value, rows = self._find(tree, name), (*batch, *self._rows.get(name, ()))
            if len(rows) > len(batch):
                value = self._check_rows(name, _to_batches(value[self._conditions[name]]), rows)
            arrays[self._names[name]] = self._array(name, value, rows)
        return arrays

    def resolve_empty(self, masks: Mapping[str, Array], ended: Array, start: int = 0) -> None:
        """Replace masks that allow nothing by all ones where the episode has ended; elsewhere refuse them.

        The action after an ending is ignored, but the policy still samples one. ``masks`` are ``[B, choices]``, of the
        environments from number ``start`` on. A conditional mask may be empty for choices that are not allowed.
        """
        for name, starts in self._starts.items():
            mask, other = masks[self._names[name]], self._conditions.get(name)
            legal = np.logical_or.reduceat(mask, starts, axis=-1)
            empty: Array = ~np.logical_and.reduce(legal, axis=-1)  # [B], or [B, choices of other]
            if other is not None:
                empty = np.logical_or.reduce(empty & self._allowed(other, masks), axis=1)
            if not empty.any():
                continue
            if (empty & ~ended).any():
                row = start + int(np.flatnonzero(empty & ~ended)[0])
                when = "in every step" if other is None else f'for each choice of "{other}" that is allowed'
                raise UserError(
                    f'{self._environment}: the mask of action "{name}" allows nothing (environment {row}); allow at '
                    f"least one choice {when}, or end the episode."
                )
            mask[empty] = True

    def _allowed(self, action: str, masks: Mapping[str, Array]) -> Array:
        """Return which choices of a Discrete its mask allows, ``[B, n]``; if it is conditional, in any case."""
        if action not in self._actions:
            return np.ones((1, 1), np.bool_)
        mask = masks[self._names[action]]
        return np.logical_or.reduce(mask, axis=1) if action in self._conditions else mask

    def _find_conditions(self, actions: Specs, example: Any) -> dict[str, str]:
        """Return the actions that masks depend on, by the name of the masked action."""
        found: dict[str, str] = {}
        for name in self._actions:
            mask = self._find(example, name)
            if not isinstance(mask, Mapping):
                continue
            keys = [key for key in mask if not key.startswith("_")]
            other = actions.get(keys[0]) if len(keys) == 1 and keys[0] != name else None
            if other is None or other.kind != "categorical" or other.shape:
                raise UserError(
                    f'{self._environment}: the mask of action "{name}" is a dict of {", ".join(keys) or "nothing"}; '
                    "give one array, or a dict of one array by the name of the Discrete action that it depends on."
                )
            found[name] = keys[0]
        for name in found:
            chain = [name]
            while chain[-1] in found and found[chain[-1]] not in chain:
                chain.append(found[chain[-1]])
            if chain[-1] in found:
                raise UserError(
                    f"{self._environment}: the masks of {', '.join(chain)} depend on each other; let each depend on an "
                    "action that is chosen before it."
                )
        return found

    def _check_rows(self, name: str, value: Any, rows: tuple[int, ...]) -> Any:
        """Return a conditional mask; refuse one without a row for each choice of the action that it depends on."""
        for part in value if isinstance(value, tuple) else (value,):
            if np.shape(part)[: len(rows)] != rows:
                raise UserError(
                    f'{self._environment}: the mask of action "{name}" has shape {np.shape(part)}, but must have '
                    f'{rows[-1]} rows, one for each choice of "{self._conditions[name]}".'
                )
        return value

    def _find(self, tree: Any, action: str) -> Any:
        tree = _to_batches(tree)
        if tree is None or self._single:
            return tree
        if isinstance(tree, Mapping) and action in tree:
            return tree[action]
        for key in action.split("/"):
            try:
                tree = _to_batches(tree[int(key)] if isinstance(tree, tuple | list) else tree[key])
            except (KeyError, IndexError, ValueError, TypeError):
                return None
        return tree

    def _array(self, name: str, value: Any, batch: tuple[int, ...]) -> Array:
        parts = value if isinstance(value, tuple | list) and np.ndim(value[0]) > len(batch) else (value,)
        shape = (*batch, -1)
        try:
            mask = np.concatenate([np.asarray(part, dtype=bool).reshape(shape) for part in parts], axis=-1)
        except (TypeError, ValueError):
            mask = np.zeros((*batch, 0), bool)
        spec = self._actions[name]
        expected, found = sum(spec.choices), mask.shape[-1]
        if spec.kind == "binary" and found == spec.size:  # may the bit be 1? it may always be 0
            return np.stack([np.ones_like(mask), mask], -1).reshape(shape)
        if found != expected:
            wanted = f"{expected} choices; give one entry per choice"
            if spec.kind == "binary":
                wanted = f"{spec.size} bits; give one entry per bit (may it be 1?) or two (may it be 0? may it be 1?)"
            raise UserError(
                f'{self._environment}: the mask of action "{name}" has {found} entries, but the action has {wanted}.'
            )
        return mask


def _to_batches(tree: Any) -> Any:
    """Convert an object array of tuples, as in the infos of a vector environment, to a tuple of batches."""
    if isinstance(tree, np.ndarray) and tree.dtype == object and len(tree) and isinstance(tree[0], tuple):
        return _stack_rows(tuple(tree))
    return tree


def _stack_rows(rows: tuple[Any, ...]) -> Any:
    if not isinstance(rows[0], tuple):
        return np.stack(rows)
    return tuple(_stack_rows(part) for part in zip(*rows, strict=True))


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
        mask = config.mask
        rest, mask_space = _split(space, mask, environment)
        lengths = parse_lengths(config.lengths)
        self.layout = Layout(rest, "observation", environment, config.max_length, lengths)
        _refuse_unknown_lists(lengths, self.layout.specs, environment)
        if config.max_length != DEFAULTS.max_length and not self.layout.padded:
            raise UserError(
                f"env.max_length is {config.max_length}, but no observation of {environment} is a Sequence, Graph or "
                "OneOf; leave it out."
            )
        self.mask_key = mask
        example = info.get(mask) if mask_space is None else mask_space.sample()
        self.masks = ActionMasks(actions, example, environment) if example is not None and mask else None
        self.mask_in_info = self.masks is not None and mask_space is None
        self._environment = environment
        for name in self.layout.specs:
            if is_mask(name):
                raise UserError(
                    f'{environment}: the name of observation "{name}" is reserved for masks; rename it, or set '
                    "env.mask to its key if it is a mask."
                )
        own = _mark_frame_stacks(self.layout.specs, frames)
        own = override_axes(_mark_padding(own), config.axes, environment)
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


def _mark_frame_stacks(specs: Specs, frames: Callable[[str], int]) -> Specs:
    """Mark images as stacks of so many frames, of which a replay buffer stores one."""
    return {
        name: replace(spec, stack=n, axes=None)
        if (n := frames(name)) > 1 and len(spec.shape) >= 3 and spec.shape[0] % n == 0
        else spec
        for name, spec in specs.items()
    }


def _mark_padding(specs: Specs) -> Specs:
    """Mark a MultiBinary ``<name>/mask`` as the padding mask of the list ``<name>``, if it has an entry per entity."""
    marked = dict(specs)
    for name, spec in specs.items():
        mask = specs.get(f"{name}/mask")
        if mask is not None and mask.kind == "binary" and spec.axes == "entities" and mask.shape == spec.shape[:1]:
            marked[f"{name}/mask"] = replace(mask, masks=name)
    return marked


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


def _refuse_unknown_lists(lengths: Mapping[str, int], specs: Specs, environment: str) -> None:
    """Refuse a name in ``env.lengths`` that is no list; the links of edges have the length of the edges."""
    lists = [spec.masks for spec in specs.values() if spec.masks is not None and not spec.masks.endswith("/edge_links")]
    for name in lengths:
        if name not in lists:
            raise UserError(
                f'env.lengths names "{name}", but the lists of variable length of {environment} are '
                f"{', '.join(lists) or 'none'}.{did_you_mean(name, lists)}"
            )


def _split(space: spaces.Space[Any], mask: str, environment: str) -> tuple[spaces.Space[Any], spaces.Space[Any] | None]:
    """Return the observation space without its mask, and the space of the mask, if there is one."""
    if not mask or not isinstance(space, spaces.Dict) or mask not in space.spaces:
        return space, None
    rest = {key: child for key, child in space.spaces.items() if key != mask}
    if not rest:
        raise UserError(f'{environment}: the observation has nothing but the mask "{mask}"; add something to observe.')
    return spaces.Dict(rest), space.spaces[mask]
