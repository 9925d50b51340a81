"""Pad values of Sequence, Graph and OneOf spaces to arrays of a fixed size, with masks. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs

if TYPE_CHECKING:
    from ludus.environments.spaces import Layout

Array = NDArray[Any]
Arrays = dict[str, Array]


class Padded(Protocol):
    """A part of an observation space whose values differ in size; ``flatten`` returns arrays like ``specs``."""

    specs: Specs

    def flatten(self, value: Any) -> Arrays: ...


class PaddedList:
    """A list of elements, as an array with one row per element, and a mask ``<name>/mask`` ``[length]``, True for them.

    An element is flattened. Where it is a Dict or Tuple, its parts are concatenated in float32, with choices as one-hot
    vectors. A list of nothing but choices stays an array of integers. ``stacked``: values have the parts of all
    elements in one array each, as in a Sequence with ``stack=True``. ``setting`` is what sets the length.
    """

    def __init__(self, element: Layout, name: str, length: int, stacked: bool, place: str, setting: str) -> None:
        self._element, self._leaves = element, list(element.leaves.items())
        self._name, self._mask, self.length = name, f"{name}/mask", length
        self._place, self._setting = place, setting
        self._in_arrays = stacked or element.is_plain  # whether numpy reads all elements at once
        if len(self._leaves) < len(element.specs):
            raise UserError(
                f"{place} is a list of lists; make it a list of Box, Discrete, or a Dict or Tuple of these."
            )
        specs = [leaf.spec for _, leaf in self._leaves]
        self._plain = specs[0] if len(specs) == 1 else None
        spec = _repeat(specs[0], length) if self._plain else _concatenate(specs, length)
        self.specs: Specs = {name: spec, self._mask: Spec((length,), "bool", "binary", masks=name)}

    def flatten(self, value: Any) -> Arrays:
        """Return the padded list and its mask."""
        spec = self.specs[self._name]
        columns, count = self._read(value)
        if count > self.length:
            raise UserError(
                f"{self._place} has {count} elements, but {self._setting} is {self.length}; raise it to the most that "
                "there can be."
            )
        padded, mask = np.zeros(spec.shape, spec.dtype), np.zeros(self.length, np.bool_)
        if count:
            mask[:count] = True
            if self._plain:
                padded[:count] = columns[0].reshape(count, *spec.shape[1:])
            else:
                parts = [_one_hot(x, leaf.spec) for x, (_, leaf) in zip(columns, self._leaves, strict=True)]
                np.concatenate(parts, 1, out=padded[:count], casting="unsafe")
        return {self._name: padded, self._mask: mask}

    def _read(self, value: Any) -> tuple[list[Array], int]:
        """Return the parts of the elements, each ``[count, …]``, and the number of elements."""
        try:
            if isinstance(value, tuple | list) and not value:
                return [], 0
            if self._in_arrays:
                found = self._element.flatten(value)
            else:
                rows = [self._element.flatten(element) for element in value]
                found = {name: np.stack([row[name] for row in rows]) for name, _ in self._leaves}
            count = len(next(iter(found.values())))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"{self._place} is a list of {self._element.space} and cannot be read as one ({type(error).__name__}: "
                f"{error}); fix the value or the space."
            ) from error
        for name, leaf in self._leaves if count else ():
            check_array(found[name], (count, *leaf.spec.shape), leaf.spec, leaf.dtype, self._place)
        return list(found.values()), count


class PaddedGraph:
    """A Graph: the lists ``<name>/nodes`` and ``<name>/edges``, and the two nodes of each edge, ``<name>/edge_links``.

    Without an edge space there are only nodes.
    """

    def __init__(self, nodes: PaddedList, edges: PaddedList | None, name: str, place: str) -> None:
        self._nodes, self._edges, self._place = nodes, edges, place
        self._names = f"{name}/nodes/mask", f"{name}/edges/mask"
        self._links, self._mask = f"{name}/edge_links", f"{name}/edge_links/mask"
        self.specs: Specs = dict(nodes.specs)
        if edges is not None:
            most, length = nodes.length, edges.length
            links = Spec(
                (length, 2), smallest_integers(most), "categorical", sizes=(most,) * 2 * length, axes="entities"
            )
            mask = Spec((length,), "bool", "binary", masks=self._links)
            self.specs |= {**edges.specs, self._links: links, self._mask: mask}

    def flatten(self, value: Any) -> Arrays:
        """Return the padded nodes, edges and links, each with its mask."""
        if not all(hasattr(value, part) for part in ("nodes", "edges", "edge_links")):
            raise UserError(f"{self._place} is a {type(value).__name__}; give a gymnasium.spaces.GraphInstance.")
        arrays = self._nodes.flatten(value.nodes)
        if self._edges is None:
            return arrays
        arrays |= self._edges.flatten(() if value.edges is None else value.edges)
        mask = arrays[self._names[1]]
        count, nodes = int(mask.sum()), int(arrays[self._names[0]].sum())
        given = np.zeros((0, 2), np.int64) if value.edge_links is None else np.asarray(value.edge_links)
        if given.shape != (count, 2) or not np.issubdtype(given.dtype, np.integer):
            raise UserError(
                f"{self._place} has {count} edges and edge_links of {given.dtype} of shape {given.shape}; give the "
                f"numbers of two nodes per edge, integers of shape ({count}, 2)."
            )
        if count and not (given.min() >= 0 and given.max() < nodes):
            raise UserError(f"{self._place} has edges from or to other nodes than its {nodes}; fix edge_links.")
        links = np.zeros(self.specs[self._links].shape, self.specs[self._links].dtype)
        links[:count] = given
        return {**arrays, self._links: links, self._mask: mask}


class PaddedChoice:
    """A OneOf: which alternative it is, ``<name>/choice``, and each, ``<name>/0`` and so on; zeros where not chosen.

    The alternatives are inner layouts with these names as their roots.
    """

    def __init__(self, alternatives: list[Layout], name: str, place: str) -> None:
        self._alternatives, self._choice, self._place = alternatives, f"{name}/choice", place
        self.specs: Specs = {self._choice: Spec((), "int64", "categorical", sizes=(len(alternatives),))}
        for alternative in alternatives:
            self.specs |= {key: _with_zero(spec) for key, spec in alternative.specs.items()}

    def flatten(self, value: Any) -> Arrays:
        """Return the number of the alternative and the arrays of all."""
        try:
            number, inner = value
            chosen = range(len(self._alternatives)).index(int(number))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self._place} is a OneOf; give a pair of the number of an alternative (0 to "
                f"{len(self._alternatives) - 1}) and its value."
            ) from error
        arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in self.specs.items()}
        arrays[self._choice][...] = chosen
        alternative = self._alternatives[chosen]
        try:
            found = alternative.flatten(inner)
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{self._place} is no {alternative.space} ({error}); fix the value or the space."
            ) from error
        for key, x in found.items():
            spec, leaf = alternative.specs[key], alternative.leaves.get(key)
            if leaf is not None:
                check_array(x, spec.shape, spec, leaf.dtype, self._place)
            arrays[key][...] = x
        return arrays


def check_array(x: Array, shape: tuple[int, ...], spec: Spec, dtype: np.dtype[Any], place: str) -> None:
    """Refuse an array of another shape or kind of number than its space, or with choices outside of it."""
    number = np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_
    integer = np.issubdtype(dtype, np.integer)
    if x.shape != shape or not number or (integer and np.issubdtype(x.dtype, np.inexact)):
        raise UserError(
            f"{place} has values of {x.dtype} of shape {x.shape}, but its space says {dtype} of shape {shape}; convert "
            "them (.astype or .reshape), or change the space."
        )
    if spec.kind == "categorical":
        wrong = (x < 0) | (x >= np.reshape(spec.sizes, spec.shape))
        if wrong.any():
            raise UserError(
                f"{place} has the choice {x[wrong].flat[0]} (counted from 0), but its space has {spec.sizes}; widen "
                "the space or fix the value."
            )


def _repeat(element: Spec, length: int) -> Spec:
    """Return the spec of a list of flattened elements."""
    if element.kind == "categorical":
        shape = (length, element.size) if element.shape else (length,)
        sizes = element.sizes * length
        return Spec(shape, smallest_integers(max(element.sizes)), "categorical", sizes=sizes, axes="entities")
    low, high = (x * length if isinstance(x, tuple) else x for x in (element.low, element.high))
    spec = Spec((length, element.size), element.dtype, element.kind, low, high, axes="entities")
    return _with_zero(spec)


def _concatenate(parts: list[Spec], length: int) -> Spec:
    """Return the spec of a list of elements of several parts."""
    low: list[float] = []
    high: list[float] = []
    for spec in parts:
        size = sum(spec.sizes) or spec.size
        zeros_and_ones = np.zeros(size), np.ones(size)
        for bounds, x in zip((low, high), spec.bounds if spec.kind == "continuous" else zeros_and_ones, strict=True):
            bounds += x.ravel().tolist()
    spec = Spec((length, len(low)), "float32", "continuous", (*low,) * length, (*high,) * length, axes="entities")
    return _with_zero(spec)


def _with_zero(spec: Spec) -> Spec:
    """Return the spec with bounds that include 0, which stands for nothing."""
    if spec.kind != "continuous":
        return spec
    low, high = spec.low, spec.high
    return replace(
        spec,
        low=tuple(min(x, 0.0) for x in low) if isinstance(low, tuple) else min(low, 0.0),
        high=tuple(max(x, 0.0) for x in high) if isinstance(high, tuple) else max(high, 0.0),
    )


def _one_hot(x: Array, spec: Spec) -> Array:
    """Return numbers ``[n, …]`` as features ``[n, F]``, choices as one-hot vectors."""
    flat = x.reshape(len(x), -1)
    if spec.kind != "categorical":
        return flat
    return np.concatenate([flat[:, [i]] == np.arange(n) for i, n in enumerate(spec.sizes)], 1)


def make_padded(
    space: spaces.Sequence | spaces.Graph | spaces.OneOf[Any],
    name: str,
    place: str,
    max_length: int,
    lengths: Mapping[str, int],
    make_layout: Callable[..., Layout],
) -> Padded:
    """Make a part of an observation space; ``make_layout(space, name, lengths)`` makes those of spaces inside of it."""

    def make_list(element: spaces.Space[Any], name: str, stacked: bool, place: str) -> PaddedList:
        setting = f"env.lengths {name}" if name in lengths else "env.max_length"
        return PaddedList(make_layout(element, name), name, lengths.get(name, max_length), stacked, place, setting)

    if isinstance(space, spaces.Sequence):
        return make_list(space.feature_space, name, space.stack, place)
    if isinstance(space, spaces.OneOf):
        alternatives = [make_layout(child, f"{name}/{i}", lengths) for i, child in enumerate(space.spaces)]
        return PaddedChoice(alternatives, name, place)
    nodes, edges = make_list(space.node_space, f"{name}/nodes", True, f"{place}, its nodes,"), None
    if space.edge_space is not None:
        edges = make_list(space.edge_space, f"{name}/edges", True, f"{place}, its edges,")
    return PaddedGraph(nodes, edges, name, place)


def flatten_rows(part: Padded, values: Iterable[Any]) -> Arrays:
    """Return the arrays ``[B, …]`` of the values of several rows."""
    rows = [part.flatten(value) for value in values]
    return {name: np.stack([row[name] for row in rows]) for name in part.specs}


def smallest_integers(size: int) -> str:
    """Return the smallest signed integer type that holds the numbers below ``size``."""
    return str(np.min_scalar_type(-size))
