"""Sequence, Graph and OneOf observations: padded arrays and masks, read back in the tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from gymnasium.vector.utils import batch_space, iterate
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.errors import UserError
from ludus.environments.spaces import Layout
from ludus.preprocess.observation import ObsPreprocessor

LENGTH = 5
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)
plain = st.one_of(
    st.builds(
        lambda shape, dtype, low: spaces.Box(low, 9, shape, dtype),
        st.sampled_from([(), (2,), (2, 3)]),
        st.sampled_from([np.float32, np.int16, np.float64]),
        st.sampled_from([-3, 2]),
    ),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)),
    st.builds(lambda n, start: spaces.MultiDiscrete(n, start=[start] * len(n)), sizes, st.integers(-2, 2)),
    st.builds(spaces.MultiBinary, st.sampled_from([1, 3, (2, 2)])),
)
keys = st.sampled_from(["a", "b", "choice", "x/y"])


def dicts_and_tuples(inner):
    return st.one_of(
        st.dictionaries(keys, inner, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
    )


elements = st.recursive(plain, dicts_and_tuples, max_leaves=3)
sequences = st.builds(lambda space, stack: spaces.Sequence(space, stack=stack), elements, st.booleans())
graph_parts = st.one_of(
    st.builds(lambda n: spaces.Box(-1, 1, (n,), np.float32), st.integers(1, 3)),
    st.builds(spaces.Discrete, st.integers(1, 4)),
)
graphs = st.builds(spaces.Graph, graph_parts, st.one_of(st.none(), graph_parts))
nested = st.recursive(
    st.one_of(plain, sequences, graphs),
    lambda inner: st.one_of(
        dicts_and_tuples(inner), st.lists(inner, min_size=1, max_size=3).map(lambda x: spaces.OneOf(tuple(x)))
    ),
    max_leaves=4,
)


def sample(space, random):
    """Draw a value with lists of 0 to LENGTH elements."""
    if isinstance(space, spaces.Dict):
        return {key: sample(child, random) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(sample(child, random) for child in space.spaces)
    if isinstance(space, spaces.OneOf):
        number = int(random.integers(len(space.spaces)))
        return number, sample(space.spaces[number], random)
    space.seed(int(random.integers(1000)))
    if isinstance(space, spaces.Sequence):
        least = int(space.stack)  # Gymnasium cannot sample a stack of nothing
        return space.sample(mask=(np.int64(random.integers(least, LENGTH + 1)), None))
    if isinstance(space, spaces.Graph):
        edges = None if space.edge_space is None else int(random.integers(LENGTH + 1))
        return space.sample(num_nodes=int(random.integers(1, LENGTH + 1)), num_edges=edges)
    return space.sample()


def features(space, value):
    """Flatten an element to one vector: numbers, and choices as one-hot vectors."""
    if isinstance(space, spaces.Dict):
        return np.concatenate([features(child, value[key]) for key, child in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return np.concatenate([features(child, x) for child, x in zip(space.spaces, value, strict=True)])
    if isinstance(space, spaces.Discrete):
        return np.eye(space.n)[value - space.start]
    if isinstance(space, spaces.MultiDiscrete):
        choices = (np.asarray(value) - space.start).ravel()
        return np.concatenate([np.eye(n)[x] for n, x in zip(space.nvec.ravel(), choices, strict=True)])
    return np.asarray(value).ravel()


def listed(space, rows, stacked):
    """Return the elements of a list as features [n, F]."""
    if stacked:
        rows = tuple(iterate(batch_space(space, 1), rows))
    return [features(space, row) for row in rows]


def unpad(array, mask, spec):
    """Return the rows of a padded list as features [n, F]; what is beyond must be zero."""
    count = int(mask.sum())
    assert mask[:count].all()
    assert not array[count:].any()
    if spec.kind != "categorical":
        return list(array[:count])
    each = spec.sizes[: len(spec.sizes) // len(array)]
    return [np.concatenate([np.eye(n)[x] for n, x in zip(each, np.ravel(row), strict=True)]) for row in array[:count]]


def same_lists(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def check(space, value, arrays, specs, name, seen):
    """Compare the arrays with the value, part by part, and collect the names of those that were compared."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, child in children:
            check(child, value[key], arrays, specs, f"{name}/{key}" if name else str(key), seen)
        return
    name = name or "observation"
    if isinstance(space, spaces.Sequence):
        seen |= {name, f"{name}/mask"}
        found = unpad(arrays[name], arrays[f"{name}/mask"], specs[name])
        same_lists(found, listed(space.feature_space, value, space.stack))
    elif isinstance(space, spaces.Graph):
        parts = [("nodes", space.node_space, value.nodes)]
        if space.edge_space is not None:
            parts.append(("edges", space.edge_space, () if value.edges is None else value.edges))
            links = () if value.edge_links is None else value.edge_links
            mask = arrays[f"{name}/edge_links/mask"]
            assert arrays[f"{name}/edge_links"][mask].tolist() == [list(link) for link in links]
            seen |= {f"{name}/edge_links", f"{name}/edge_links/mask"}
        for part, child, rows in parts:
            seen |= {f"{name}/{part}", f"{name}/{part}/mask"}
            found = unpad(arrays[f"{name}/{part}"], arrays[f"{name}/{part}/mask"], specs[f"{name}/{part}"])
            same_lists(found, listed(child, rows, True) if len(rows) else [])
    elif isinstance(space, spaces.OneOf):
        seen.add(f"{name}/choice")
        assert arrays[f"{name}/choice"] == value[0]
        check(space.spaces[value[0]], value[1], arrays, specs, f"{name}/{value[0]}", seen)
        for i in set(range(len(space.spaces))) - {value[0]}:
            others = {key for key in arrays if key == f"{name}/{i}" or key.startswith(f"{name}/{i}/")}
            assert not any(arrays[key].any() for key in others)
            seen |= others
    else:
        seen.add(name)
        found = np.asarray(value)
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            found = found - space.start
        np.testing.assert_array_equal(arrays[name], found)


@settings(deadline=None, max_examples=150)
@given(nested, st.integers(0, 999))
def test_padded_values_can_be_read_back(space, seed):
    layout, random = Layout(space, "observation", max_length=LENGTH), np.random.default_rng(seed)
    rows = [sample(space, random) for _ in range(2)]
    for value in rows:
        arrays, seen = layout.flatten(value), set()
        assert arrays.keys() == layout.specs.keys()
        check(space, value, arrays, layout.specs, "", seen)
        assert seen == arrays.keys()
        for name, spec in layout.specs.items():
            assert arrays[name].shape == spec.shape
            if name not in layout.leaves:
                assert arrays[name].dtype == spec.dtype
            if spec.masks is not None:
                assert layout.specs[spec.masks].axes == "entities"
                assert spec.shape == layout.specs[spec.masks].shape[:1]
            if spec.kind == "continuous":  # padding too is within the bounds
                assert (arrays[name] >= spec.bounds[0]).all()
                assert (arrays[name] <= spec.bounds[1]).all()


@settings(deadline=None, max_examples=50)
@given(nested, st.integers(0, 999))
def test_networks_get_features_first_and_zero_padding(space, seed):
    layout, random = Layout(space, "observation", max_length=LENGTH), np.random.default_rng(seed)
    preprocess = ObsPreprocessor(layout.specs)
    rows = [layout.flatten(sample(space, random)) for _ in range(2)]
    raw = {
        name: torch.from_numpy(np.stack([row[name].astype(spec.dtype) for row in rows])[None])
        for name, spec in layout.specs.items()
    }
    ready = preprocess(raw)
    assert preprocess.shapes.keys() == {name for name, spec in layout.specs.items() if spec.masks is None}
    for name, shape in preprocess.shapes.items():
        assert ready[name].shape == (1, 2, *shape)
        assert ready[name].dtype == (torch.int64 if name in preprocess.categories else torch.float32)
        assert 1 <= len(shape) <= 2
    assert preprocess.masks == {spec.masks: name for name, spec in layout.specs.items() if spec.masks is not None}
    for name, mask in preprocess.masks.items():
        assert torch.equal(ready[mask], raw[mask])
        assert not ready[name].mT[~raw[mask]].any()
        if layout.specs[name].kind == "categorical":  # one choice per element is set where there is an element
            assert torch.equal((ready[name] > 0).any(-2), raw[mask])


@settings(deadline=None, max_examples=30)
@given(nested, st.integers(0, 999))
def test_batches_as_in_vector_environments(space, seed):
    layout, random = Layout(space, "observation", max_length=LENGTH), np.random.default_rng(seed)
    rows = [sample(space, random) for _ in range(3)]
    batch = batched(space, rows)
    arrays = layout.flatten(batch, batched=True)
    for i, row in enumerate(rows):
        for name, x in layout.flatten(row).items():
            np.testing.assert_array_equal(arrays[name][i], x)


def batched(space, rows):
    """Return the rows as Gymnasium's vector environments do: values that differ in size stay a tuple."""
    if isinstance(space, spaces.Dict):
        return {key: batched(child, [row[key] for row in rows]) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(batched(child, [row[i] for row in rows]) for i, child in enumerate(space.spaces))
    return tuple(rows) if isinstance(space, spaces.Sequence | spaces.Graph | spaces.OneOf) else np.stack(rows)


def test_an_empty_stack_is_all_padding():
    space = spaces.Sequence(spaces.Dict(a=BOX, b=spaces.Discrete(3)), stack=True)
    empty = {"a": np.zeros((0, 2), np.float32), "b": np.zeros(0, np.int64)}
    arrays = Layout(space, "observation", max_length=4).flatten(empty)
    assert {name: (x.shape, x.any()) for name, x in arrays.items()} == {
        "observation": ((4, 5), False),
        "observation/mask": ((4,), False),
    }


BOX = spaces.Box(-1, 1, (2,), np.float32)
PAIR = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("space", "value", "says"),
    [
        (spaces.Sequence(BOX), (PAIR[0],) * 4, r'E: observation "observation" has 4 elements, but env.max_length is 3'),
        (spaces.Sequence(BOX, stack=True), np.zeros((2, 3), np.float32), r"shape \(2, 3\), but its space says"),
        (spaces.Sequence(BOX), (np.zeros(2), np.zeros(3)), "is a list of Box"),
        (spaces.Sequence(BOX), 5, "is a list of Box"),
        (spaces.Sequence(spaces.Dict(a=BOX)), ({"b": PAIR[0]},), "is a list of Dict.*KeyError"),
        (spaces.Sequence(spaces.Discrete(3)), (1, 3), r"has the choice 3 .counted from 0., but its space has \(3,\)"),
        (spaces.Sequence(spaces.Discrete(3)), (1.0, 2.0), "float64 of shape"),
        (spaces.Graph(BOX, None), PAIR, "is a ndarray; give a gymnasium.spaces.GraphInstance"),
        (spaces.Graph(BOX, BOX), GraphInstance(PAIR, PAIR, np.zeros((1, 2), int)), r"has 2 edges.*shape \(1, 2\)"),
        (spaces.Graph(BOX, BOX), GraphInstance(PAIR, PAIR, None), r"has 2 edges.*shape \(0, 2\)"),
        (spaces.Graph(BOX, BOX), GraphInstance(PAIR, PAIR, np.full((2, 2), 2)), "other nodes than its 2"),
        (spaces.Graph(BOX, BOX), GraphInstance(PAIR, PAIR, np.zeros((2, 2))), "edge_links of float64"),
        (spaces.Graph(BOX, None), GraphInstance(np.zeros((4, 2)), None, None), "its nodes, has 4 elements"),
        (spaces.OneOf((BOX, BOX)), (2, PAIR[0]), "number of an alternative .0 to 1."),
        (spaces.OneOf((BOX, BOX)), (-1, PAIR[0]), "number of an alternative .0 to 1."),
        (spaces.OneOf((BOX, BOX)), PAIR[0, 0], "number of an alternative"),
        (spaces.OneOf((BOX, BOX)), (1, PAIR), r"shape \(2, 2\), but its space says"),
        (spaces.OneOf((spaces.Dict(a=BOX),)), (0, {"b": PAIR[0]}), "is no Dict"),
    ],
)
def test_values_outside_of_their_space_are_refused(space, value, says):
    with pytest.raises(UserError, match=says):
        Layout(space, "observation", "E", 3).flatten(value)


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (spaces.Sequence(spaces.Sequence(BOX)), "list of lists"),
        (spaces.Sequence(spaces.Dict(a=spaces.Graph(BOX, None))), "list of lists"),
        (spaces.Sequence(spaces.Text(3)), "is a Text, which is not supported; .* Sequence, Graph or OneOf"),
        (spaces.Dict({"a": spaces.Sequence(BOX), "a/mask": spaces.MultiBinary(3)}), 'both called "a/mask"'),
        (spaces.Sequence(spaces.Box(0, 1, (0,))), "is empty"),
    ],
)
def test_spaces_that_cannot_be_padded_are_refused(space, says):
    with pytest.raises(UserError, match=says):
        Layout(space, "observation", "E", 3)


@pytest.mark.parametrize("space", [spaces.Sequence(BOX), spaces.Graph(BOX, None), spaces.OneOf((BOX, BOX))])
def test_actions_of_variable_size_are_refused(space):
    with pytest.raises(
        UserError, match=r'E: action space "a" is a \w+, which is not supported; use .* Dict or Tuple\.'
    ):
        Layout(spaces.Dict(a=space), "action", "E")
