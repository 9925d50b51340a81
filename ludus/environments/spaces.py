"""Convert values of Gymnasium spaces to named arrays and back. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs
from ludus.environments.padded import Padded, flatten_rows, make_padded, smallest_integers

Array = NDArray[Any]
Arrays = dict[str, Array]
Path = tuple[str | int, ...]
NO_LENGTHS: Mapping[str, int] = MappingProxyType({})


class ResultSpace(spaces.Box):
    """The reward or the status of one of several agents: a number that networks do not see (``Spec.result_of``)."""

    def __init__(self, agent: str, low: float, high: float, dtype: type[Any]) -> None:
        super().__init__(low, high, (), dtype)
        self.agent = agent


@dataclass(frozen=True)
class Leaf:
    """A plain space inside a nested one."""

    path: Path
    spec: Spec
    dtype: np.dtype[Any]  # of the space
    start: Array | None  # the smallest value of a discrete space, where it is not 0


class Layout:
    """Names the parts of a space, and converts its values to named arrays (``flatten``) and back (``unflatten``).

    A plain space is named ``root``; Dict keys and Tuple indices are joined by ``/``, after the root if the space is
    ``inner`` to another. ``flatten`` takes one row or a batch as in Gymnasium's vector environments, nested ``[B, …]``
    arrays; padded parts come as one value per row, so that it has to be told.

    ``padded`` are the parts that differ in size (Sequence, Graph, OneOf), by their paths; lists are padded to
    ``max_length``, or to their own of ``lengths``. With 0 there may be no such parts, and only then values can be
    converted back.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        root: str,
        environment: str = "environment",
        max_length: int = 0,
        lengths: Mapping[str, int] = NO_LENGTHS,
        inner: bool = False,
    ) -> None:
        self.space, self.root, self._environment, self._inner = space, root, environment, inner
        self._max_length, self._lengths = max_length, lengths
        self._kind = "observation" if max_length else root  # in messages; the root of a part is its name
        self.specs: Specs = {}
        self.leaves: dict[str, Leaf] = {}
        self.padded: dict[Path, Padded] = {}
        self._add(space, ())
        if not any(spec.size for spec in self.specs.values()):
            raise UserError(f"{environment}: the {root} space {space} is empty; give it at least one number.")
        self._plain = self.leaves.get(root) if not isinstance(space, spaces.Dict | spaces.Tuple) else None

    @property
    def is_plain(self) -> bool:
        """Whether the space has no parts."""
        return self._plain is not None

    def flatten(self, value: Any, batched: bool = False) -> Arrays:
        """Return the named arrays of a nested value, or of a batch of them; discrete values count from 0."""
        if self._plain is not None:
            return {self.root: _flatten_leaf(value, self._plain)}
        arrays = self.flatten_leaves(value)
        for path, part in self.padded.items():
            own = reduce(getitem, path, value)
            arrays |= flatten_rows(part, own) if batched else part.flatten(own)
        return arrays

    def flatten_leaves(self, value: Any) -> Arrays:
        """Return the named arrays without padded parts."""
        return {name: _flatten_leaf(reduce(getitem, leaf.path, value), leaf) for name, leaf in self.leaves.items()}

    def unflatten(self, arrays: Mapping[str, Array]) -> Any:
        """Return the nested value of a batch: each leaf ``[B, …]`` in the dtype of its space."""
        if self._plain is not None:
            return _unflatten_leaf(arrays[self.root], self._plain)
        return self.nest({name: _unflatten_leaf(arrays[name], leaf) for name, leaf in self.leaves.items()})

    def unflatten_row(self, arrays: Mapping[str, Array], row: int) -> Any:
        """Return the nested value of one row of a batch."""
        return self.unflatten({name: x[row] for name, x in arrays.items()})

    def nest(self, values: Mapping[str, Any]) -> Any:
        """Nest values, given by name, like the space."""

        def build(space: spaces.Space[Any], path: Path) -> Any:
            if isinstance(space, spaces.Dict):
                return {key: build(child, (*path, key)) for key, child in space.spaces.items()}
            if isinstance(space, spaces.Tuple):
                return tuple(build(child, (*path, key)) for key, child in enumerate(space.spaces))
            return values[self._name(path)]

        return build(self.space, ())

    def _name(self, path: Path) -> str:
        return "/".join(map(str, (self.root, *path) if self._inner else path)) or self.root

    def _add(self, space: spaces.Space[Any], path: Path) -> None:
        if isinstance(space, spaces.Dict | spaces.Tuple):
            for key, child in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
                self._add(child, (*path, key))
            return
        name, environment = self._name(path), self._environment
        if self._max_length and isinstance(space, spaces.Sequence | spaces.Graph | spaces.OneOf):
            place = f'{environment}: {self._kind} "{name}"'
            part = make_padded(space, name, place, self._max_length, self._lengths, self._inner_layout)
            self.padded[path], specs = part, part.specs
        else:
            leaf = _leaf(space, path, f'{environment}: {self._kind} space "{name}"', self._max_length > 0)
            if leaf.spec.axes == "grid" and self._kind != "action":  # it has many elements
                leaf = replace(leaf, spec=replace(leaf.spec, dtype=smallest_integers(max(leaf.spec.sizes))))
            self.leaves[name], specs = leaf, {name: leaf.spec}
        for name, spec in specs.items():
            if name in self.specs:
                raise UserError(
                    f'{environment}: two parts of the {self._kind} space are both called "{name}"; rename one.'
                )
            if not spec.size:
                raise UserError(
                    f'{environment}: the {self._kind} space "{name}" is empty; remove it, or give it a size.'
                )
            self.specs[name] = spec

    def _inner_layout(self, space: spaces.Space[Any], name: str, lengths: Mapping[str, int] = NO_LENGTHS) -> Layout:
        return Layout(space, name, self._environment, self._max_length, lengths, inner=True)


def _flatten_leaf(value: Any, leaf: Leaf) -> Array:
    array = np.asarray(value)
    return array if leaf.start is None else array - leaf.start


def _unflatten_leaf(array: Array, leaf: Leaf) -> Any:
    typed = array if array.dtype == leaf.dtype else array.astype(leaf.dtype)
    return typed if leaf.start is None else (typed + leaf.start).astype(leaf.dtype, copy=False)


def _leaf(space: spaces.Space[Any], path: Path, place: str, may_pad: bool) -> Leaf:
    if isinstance(space, spaces.Box):
        if (space.low > space.high).any():
            raise UserError(f"{place} has a low above its high; make low < high everywhere.")
        spec = Spec(tuple(space.shape), str(np.dtype(space.dtype)), "continuous", _bound(space.low), _bound(space.high))
        if isinstance(space, ResultSpace):
            spec = replace(spec, result_of=space.agent)
        return Leaf(path, spec, np.dtype(space.dtype), None)
    if isinstance(space, spaces.Discrete):
        spec = Spec((), "int64", "categorical", sizes=(int(space.n),))
        return Leaf(path, spec, np.dtype(np.int64), np.int64(space.start) if space.start != 0 else None)  # type: ignore[arg-type]
    if isinstance(space, spaces.MultiDiscrete):
        sizes = tuple(int(n) for n in space.nvec.flatten())
        spec = Spec(tuple(space.nvec.shape), "int64", "categorical", sizes=sizes)
        return Leaf(path, spec, np.dtype(space.dtype), space.start if space.start.any() else None)
    if isinstance(space, spaces.MultiBinary):
        return Leaf(path, Spec(tuple(space.shape), "int8", "binary"), np.dtype(space.dtype), None)
    more = "Dict, Tuple, Sequence, Graph or OneOf" if may_pad else "Dict or Tuple"
    raise UserError(
        f"{place} is a {type(space).__name__}, which is not supported; use Box, Discrete, MultiDiscrete, MultiBinary, "
        f"{more}."
    )


def _bound(bound: Array) -> float | tuple[float, ...]:
    """Return the bound as one number if all elements are equal; the largest number of a float type means no bound."""
    wide = bound.astype(np.float64)
    if np.issubdtype(bound.dtype, np.floating):
        limit = float(np.finfo(bound.dtype).max)
        wide = np.where(np.abs(wide) >= limit, np.copysign(np.inf, wide), wide)
    values = wide.ravel()
    if values.size and (values == values[0]).all():
        return float(values[0])
    return tuple(values.tolist())
