from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.errors import UserError
from ludus.environments.spaces import Layout

keys = st.text("abcxyz", min_size=1, max_size=3)
shapes = st.sampled_from([(), (2,), (2, 3)])
dtypes = st.sampled_from([np.float32, np.int16, np.float64])
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)
plain = st.one_of(
    st.builds(lambda shape, dtype: spaces.Box(-3, 9, shape, dtype), shapes, dtypes),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)),
    st.builds(lambda n, start: spaces.MultiDiscrete(n, start=[start] * len(n)), sizes, st.integers(-2, 2)),
    st.builds(spaces.MultiBinary, st.sampled_from([1, 3, (2, 2)])),
)
nested = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=5,
)


def equal(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype


@given(nested, st.integers(0, 999))
def test_a_row_survives_the_round_trip(space, seed):
    space.seed(seed)
    layout, value = Layout(space, "action"), space.sample()
    flat = layout.flatten(value)
    assert flat.keys() == layout.specs.keys()
    for name, spec in layout.specs.items():
        assert flat[name].shape == spec.shape
        if spec.kind == "categorical":
            assert (flat[name].ravel() >= 0).all()
            assert (flat[name].ravel() < np.array(spec.sizes)).all()
    again = layout.unflatten_row({name: x[None] for name, x in flat.items()}, 0)
    assert space.contains(again)
    assert equal(value, again)


@given(nested, st.integers(0, 999))
@settings(max_examples=50)
def test_a_batch_survives_the_round_trip(space, seed):
    space.seed(seed)
    rows = [space.sample() for _ in range(3)]
    batch = concatenate(space, rows, create_empty_array(space, 3))
    layout = Layout(space, "observation")
    flat = layout.flatten(batch)
    for name, x in flat.items():
        assert x.shape == (3, *layout.specs[name].shape)
        np.testing.assert_array_equal(x[1], layout.flatten(rows[1])[name])
    again = layout.unflatten(flat)
    assert batch_space(space, 3).contains(again)
    for row in range(3):
        assert equal(layout.unflatten_row(flat, row), rows[row])


def test_names_and_kinds():
    space = spaces.Dict(
        camera=spaces.Dict(left=spaces.Box(0, 255, (3, 4, 4), np.uint8)),
        pos=spaces.Tuple([spaces.Discrete(3, start=5), spaces.MultiBinary(2)]),
    )
    specs = Layout(space, "observation").specs
    assert list(specs) == ["camera/left", "pos/0", "pos/1"]
    assert [s.kind for s in specs.values()] == ["continuous", "categorical", "binary"]
    assert (specs["camera/left"].low, specs["camera/left"].high, specs["camera/left"].dtype) == (0, 255, "uint8")
    assert (specs["pos/0"].shape, specs["pos/0"].sizes) == ((), (3,))
    assert list(Layout(spaces.Discrete(2), "action").specs) == ["action"]


def test_bounds_per_element_and_infinite_bounds():
    box = spaces.Box(np.array([0, -np.inf], np.float32), np.array([1, np.finfo(np.float32).max], np.float32))
    spec = Layout(box, "action").specs["action"]
    assert (spec.low, spec.high) == ((0.0, -np.inf), (1.0, np.inf))
    assert spec.bounded.tolist() == [True, False]


def test_unsupported_spaces_are_refused():
    space = spaces.Dict(said=spaces.Text(5))
    with pytest.raises(UserError, match=r'observation space "said" is a Text'):
        Layout(space, "observation", "MyEnv")


def test_equal_names_are_refused():
    space = spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict(b=spaces.Discrete(2))})
    with pytest.raises(UserError, match='"a/b"'):
        Layout(space, "observation")
