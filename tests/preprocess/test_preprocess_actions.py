from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.preprocess.action_inverter import ActionInverter
from ludus.preprocess.actions import ActionPreprocessor

BOX = Spec((2,), "float32", low=(-2.0, 0.0), high=(2.0, 10.0))
finite = st.floats(-1e6, 1e6, width=32)


def treat(spec: Spec, action_transform: str, x: list) -> list:
    return ActionPreprocessor({"a": spec}, {"a": action_transform})({"a": np.array(x, np.float32)})["a"].tolist()


def test_clip_maps_the_unit_cube_to_the_box():
    assert treat(BOX, "clip", [[-1, -1], [0, 0], [1, 1], [9, -9], [0.5, 0.5]]) == [
        [-2, 0], [0, 5], [2, 10], [2, 0], [1, 7.5],
    ]  # fmt: skip


def test_tanh_squashes_first():
    found = treat(BOX, "tanh", [[0, 0], [100, -100], [np.arctanh(0.5), np.arctanh(-0.5)]])
    np.testing.assert_allclose(found, [[0, 5], [2, 0], [1, 2.5]], atol=1e-6)


def test_unit_runs_from_low_to_high():
    assert treat(BOX, "unit", [[0, 0], [1, 1], [0.25, 0.5]]) == [[-2, 0], [2, 10], [-1, 5]]


def test_none_returns_the_same_arrays():
    specs = {"a": BOX, "b": Spec((), "int64", "categorical", sizes=(3,))}
    actions = {"a": np.zeros((4, 2), np.float32), "b": np.zeros(4, np.int64)}
    same = ActionPreprocessor(specs, {"a": "none"})(actions)
    assert [id(x) for x in same.values()] == [id(x) for x in actions.values()]
    mixed = ActionPreprocessor(specs, {"a": "clip", "b": "none"})(actions)
    assert mixed["b"] is actions["b"]
    assert mixed["a"] is not actions["a"]


def test_half_bounded_elements_are_clipped_but_not_scaled():
    spec = Spec((3,), "float32", low=(-np.inf, 0.0, -3.0), high=(np.inf, np.inf, 3.0))
    assert treat(spec, "clip", [[7, -7, 7], [-7, 7, 0.5]]) == [[7, 0, 3], [-7, 7, 1.5]]


@pytest.mark.parametrize("action_transform", ["tanh", "unit"])
def test_unbounded_elements_cannot_be_squashed(action_transform):
    with pytest.raises(UserError, match=r'"a".*finite bounds'):
        ActionPreprocessor({"a": Spec((1,), "float32", low=0.0)}, {"a": action_transform})


def test_error_messages():
    with pytest.raises(UserError, match='Did you mean "tanh"'):
        ActionPreprocessor({"a": BOX}, {"a": "tahn"})
    with pytest.raises(UserError, match='names "b"'):
        ActionPreprocessor({"a": BOX}, {"b": "clip"})
    with pytest.raises(UserError, match="categorical"):
        ActionPreprocessor({"a": Spec((), "int64", "categorical", sizes=(2,))}, {"a": "clip"})


def test_integer_boxes_are_rounded():
    spec = Spec((), "int32", low=0.0, high=10.0)
    made = ActionPreprocessor({"a": spec}, {"a": "clip"})({"a": np.array([-1, -0.93, 0.33, 1], np.float32)})["a"]
    assert made.dtype == np.int32
    assert made.tolist() == [0, 0, 7, 10]


@given(hnp.arrays(np.float32, (5, 3), elements=finite), st.data(), st.sampled_from(["clip", "tanh", "unit"]))
def test_actions_stay_in_the_box(x, data, action_transform):
    low = data.draw(hnp.arrays(np.float32, 3, elements=finite))
    high = low + data.draw(hnp.arrays(np.float32, 3, elements=st.floats(0, 1e6, width=32)))
    spec = Spec((3,), "float32", low=tuple(low.tolist()), high=tuple(high.tolist()))
    made = ActionPreprocessor({"a": spec}, {"a": action_transform})({"a": x})["a"]
    assert made.dtype == np.float32
    assert made.shape == x.shape
    assert ((made >= low) & (made <= high)).all()


@given(st.sampled_from(["clip", "tanh", "unit"]), hnp.arrays(np.float32, (5, 2), elements=st.floats(0, 1, width=32)))
def test_the_inverse_recovers_the_environments_actions(transform: str, fraction: np.ndarray):
    low, high = BOX.bounds
    action = (low + fraction * (high - low)).astype(np.float32)
    policy = ActionInverter({"a": BOX}, {"a": transform})({"a": action})["a"]
    assert policy.dtype == np.float32
    assert np.isfinite(policy).all()
    again = ActionPreprocessor({"a": BOX}, {"a": transform})({"a": policy})["a"]
    np.testing.assert_allclose(again, action, atol=3e-5)


def test_the_inverse_of_actions_beyond_the_bounds_is_finite():
    beyond = {"a": np.array([[-9.0, 99.0]], np.float32)}
    assert ActionInverter({"a": BOX}, {"a": "clip"})(beyond)["a"].tolist() == [[-1, 1]]
    tanh = ActionInverter({"a": BOX}, {"a": "tanh"})(beyond)["a"]
    np.testing.assert_allclose(tanh, [[-7.254, 7.254]], atol=1e-2)  # atanh(1 − 1e-6)
    unit = ActionInverter({"a": BOX}, {"a": "unit"})(beyond)["a"]
    assert 0 < unit[0, 0] < unit[0, 1] < 1


def test_the_inverse_of_elements_without_bounds_and_of_choices_is_the_identity():
    specs = {"a": Spec((2,), "float32", low=(-np.inf, -2.0), high=(np.inf, 2.0)), "b": Spec((), "int64", "categorical")}
    actions = {"a": np.array([[50.0, 1.0]], np.float32), "b": np.array([1])}
    found = ActionInverter(specs, {"a": "clip"})(actions)
    assert found["a"].tolist() == [[50.0, 0.5]]
    assert found["b"] is actions["b"]


def test_the_inverse_of_an_element_with_a_single_value():
    spec = Spec((1,), "float32", low=3.0, high=3.0)
    assert ActionInverter({"a": spec}, {"a": "clip"})({"a": np.array([[3.0]], np.float32)})["a"].tolist() == [[0]]
