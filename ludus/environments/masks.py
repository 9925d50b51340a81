"""Read action masks into named arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ludus.core.errors import UserError, did_you_mean
from ludus.core.spec import Spec, Specs, mask_name
from ludus.environments.spaces import Array, Arrays


class _Mask(NamedTuple):
    """The mask of one action."""

    spec: Spec  # of the action
    name: str  # of the mask among observations
    given: str  # the action that it depends on, or ""
    rows: tuple[int, ...]  # (the number of choices of that action,), or ()
    starts: Array  # of the elements of the action


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
        self._masks: dict[str, _Mask] = {}  # by action
        discrete = {name: spec for name, spec in actions.items() if spec.choices}
        for name, spec in discrete.items():
            if (mask := self._find(example, name)) is not None:
                given = self._condition(name, mask, actions)
                rows = actions[given].sizes if given else ()
                starts = np.cumsum((0, *spec.choices[:-1]))
                self._masks[name] = _Mask(spec, mask_name(name, actions, given), given, rows, starts)
        self._refuse_cycles()
        self.specs: Specs = {
            mask.name: Spec((*mask.rows, sum(mask.spec.choices)), "bool", "binary") for mask in self._masks.values()
        }
        if example is not None and not self.specs:
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

    def read(self, tree: Any, batch: tuple[int, ...] = ()) -> Arrays:
        """Return the masks in ``tree`` by name, ``[*batch, choices]``, or ``[*batch, n, choices]`` if conditional."""
        arrays: Arrays = {}
        for action, mask in self._masks.items():
            value, rows = self._find(tree, action), (*batch, *mask.rows)
            if mask.given:
                value = _to_batches(value[mask.given])
                for part in value if isinstance(value, tuple) else (value,):
                    if np.shape(part)[: len(rows)] != rows:
                        raise UserError(
                            f'{self._environment}: the mask of action "{action}" has shape {np.shape(part)}, but must '
                            f'have {rows[-1]} rows, one for each choice of "{mask.given}".'
                        )
            arrays[mask.name] = self._array(action, value, rows)
        return arrays

    def resolve_empty(self, masks: Mapping[str, Array], ended: Array, start: int = 0) -> None:
        """Replace masks that allow nothing by all ones where the episode has ended; elsewhere refuse them.

        The action after an ending is ignored, but the policy still samples one. ``masks`` are ``[B, choices]``, of the
        environments from number ``start`` on. A conditional mask may be empty for choices that are not allowed.
        """
        for action, (_, name, given, _, starts) in self._masks.items():
            legal = np.logical_or.reduceat(masks[name], starts, axis=-1)
            empty: Array = ~np.logical_and.reduce(legal, axis=-1)  # [B], or [B, choices of given]
            if given:
                if (other := self._masks.get(given)) is not None:
                    allowed = masks[other.name]
                    empty &= np.logical_or.reduce(allowed, axis=1) if other.given else allowed
                empty = np.logical_or.reduce(empty, axis=1)
            if not empty.any():
                continue
            if (empty & ~ended).any():
                row = start + int(np.flatnonzero(empty & ~ended)[0])
                when = f'for each choice of "{given}" that is allowed' if given else "in every step"
                raise UserError(
                    f'{self._environment}: the mask of action "{action}" allows nothing (environment {row}); allow at '
                    f"least one choice {when}, or end the episode."
                )
            masks[name][empty] = True

    def _condition(self, action: str, mask: Any, actions: Specs) -> str:
        """Return the action that a mask depends on; "" if there is none."""
        if not isinstance(mask, Mapping):
            return ""
        keys: list[str] = [key for key in mask if not key.startswith("_")]
        other = actions.get(keys[0]) if len(keys) == 1 and keys[0] != action else None
        if other is None or other.kind != "categorical" or other.shape:
            raise UserError(
                f'{self._environment}: the mask of action "{action}" is a dict of {", ".join(keys) or "nothing"}; '
                "give one array, or a dict of one array by the name of the Discrete action that it depends on."
            )
        return keys[0]

    def _refuse_cycles(self) -> None:
        """Refuse masks that depend on each other."""
        for name in self._masks:
            chain = [name]
            while (mask := self._masks.get(chain[-1])) is not None and mask.given:
                if mask.given in chain:
                    raise UserError(
                        f"{self._environment}: the masks of {', '.join(chain)} depend on each other; let each depend "
                        "on an action that is chosen before it."
                    )
                chain.append(mask.given)

    def _find(self, tree: Any, action: str) -> Any:
        """Return the mask of an action, by its name or nested like the action; None if it is not masked."""
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

    def _array(self, action: str, value: Any, batch: tuple[int, ...]) -> Array:
        parts = value if isinstance(value, tuple | list) and np.ndim(value[0]) > len(batch) else (value,)
        shape = (*batch, -1)
        try:
            mask = np.concatenate([np.asarray(part, dtype=bool).reshape(shape) for part in parts], axis=-1)
        except (TypeError, ValueError):
            mask = np.zeros((*batch, 0), bool)
        spec = self._masks[action].spec
        expected, found = sum(spec.choices), mask.shape[-1]
        if spec.kind == "binary" and found == spec.size:  # may the bit be 1? it may always be 0
            return np.stack([np.ones_like(mask), mask], -1).reshape(shape)
        if found != expected:
            wanted = f"{expected} choices; give one entry per choice"
            if spec.kind == "binary":
                wanted = f"{spec.size} bits; give one entry per bit (may it be 1?) or two (may it be 0? may it be 1?)"
            raise UserError(
                f'{self._environment}: the mask of action "{action}" has {found} entries, but the action has {wanted}.'
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
