from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from ludus.core.errors import UserError
from ludus.environments.check import sample_allowed
from ludus.environments.config import EnvConfig
from ludus.environments.masks import ActionMasks
from ludus.environments.observations import ObservationReader
from ludus.environments.spaces import Layout

DISCRETE = Layout(spaces.Discrete(3), "action").specs
MULTI = Layout(spaces.MultiDiscrete([2, 3]), "action").specs
BITS = Layout(spaces.MultiBinary(3), "action").specs
SEVERAL = Layout(spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.Discrete(3)])), "action").specs


def test_a_mask_in_the_observation_is_renamed():
    space = spaces.Dict(x=spaces.Box(0, 1, (2,)), legal=spaces.MultiBinary(3))
    reader = ObservationReader(space, DISCRETE, EnvConfig(mask="legal"), {}, "E")
    assert list(reader.specs) == ["x", "action_mask"]
    read = reader.read({"x": np.ones(2, np.float32), "legal": np.array([0, 1, 1], np.int8)}, {})
    assert read["action_mask"].tolist() == [False, True, True]
    assert "legal" not in read


def test_mask_in_info():
    reader = ObservationReader(spaces.Box(0, 1, (2,)), DISCRETE, EnvConfig(), {"action_mask": [1, 1, 0]}, "E")
    read = reader.read(np.ones(2), {"action_mask": [0, 1, 0]})
    assert read["action_mask"].tolist() == [False, True, False]
    with pytest.raises(UserError, match="lacks it now"):
        reader.read(np.ones(2), {})


def test_masks_of_a_multi_discrete_as_one_array_or_a_tuple():
    masks = ActionMasks(MULTI, (np.ones(2), np.ones(3)), "E")
    apart = masks.read((np.array([1, 0]), np.array([0, 1, 1])))
    joined = masks.read(np.array([1, 0, 0, 1, 1]))
    assert apart["action_mask"].tolist() == joined["action_mask"].tolist() == [True, False, False, True, True]


def test_masks_of_all_or_some_of_several_actions():
    masks = ActionMasks(SEVERAL, {"a": [1, 1], "b": ([1, 1, 1],)}, "E")
    assert list(masks.specs) == ["action_mask/a", "action_mask/b/0"]
    assert masks.read({"a": [1, 0], "b/0": [0, 0, 1]})["action_mask/b/0"].tolist() == [False, False, True]
    assert list(ActionMasks(SEVERAL, {"a": [1, 1]}, "E").specs) == ["action_mask/a"]


def test_masks_of_a_batch():
    masks = ActionMasks(MULTI, np.ones(5), "E")
    given = np.arange(10).reshape(2, 5) % 3 > 0
    np.testing.assert_array_equal(masks.read(given, (2,))["action_mask"], given)


def test_empty_masks_are_refused_unless_the_episode_has_ended():
    masks = ActionMasks(MULTI, np.ones(5), "E")
    empty = {
        "action_mask": np.array([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0]], bool)
    }  # row 0: its second element has no choice
    with pytest.raises(UserError, match="environment 0"):
        masks.resolve_empty(empty, np.array([False, False]))
    masks.resolve_empty(empty, np.array([True, False]))
    assert empty["action_mask"].tolist() == [[True] * 5, [True, False, True, False, False]]


@pytest.mark.parametrize(
    ("space", "mask", "says"),
    [
        (spaces.Dict(x=spaces.Discrete(2), action_mask=spaces.MultiBinary(4)), "action_mask", "4 entries.*3 choices"),
        (spaces.Dict(action_mask=spaces.MultiBinary(3)), "action_mask", "nothing but the mask"),
        (spaces.Dict(x=spaces.Discrete(2), action_mask=spaces.MultiBinary(3)), "", "reserved for masks"),
    ],
)
def test_invalid_masks_are_refused_before_training(space, mask, says):
    with pytest.raises(UserError, match=says):
        ObservationReader(space, DISCRETE, EnvConfig(mask=mask), {}, "E")


def test_a_mask_without_discrete_action_is_refused():
    actions = Layout(spaces.Box(-1, 1, (2,)), "action").specs
    with pytest.raises(UserError, match="no discrete action"):
        ObservationReader(spaces.Discrete(2), actions, EnvConfig(), {"action_mask": [1, 1]}, "E")


def test_samples_are_allowed_choices():
    mask = {"action_mask": np.array([[0, 1, 1, 0, 1]] * 200, bool)}
    drawn = sample_allowed(MULTI, mask, np.random.default_rng(0))["action"]
    assert drawn.shape == (200, 2)
    assert set(drawn[:, 0]) == {1}
    assert set(drawn[:, 1]) == {0, 2}


def test_masks_of_bits_have_one_or_two_entries_per_bit():
    masks = ActionMasks(BITS, np.ones(3), "E")
    assert masks.specs["action_mask"].shape == (6,)
    both = [True, True]
    assert masks.read([1, 0, 1])["action_mask"].reshape(3, 2).tolist() == [both, [True, False], both]
    given = np.array([[1, 1], [0, 1], [1, 0]])
    for mask in (given, given.ravel(), tuple(given), given.tolist()):
        assert masks.read(mask)["action_mask"].tolist() == given.astype(bool).ravel().tolist()
    batch = np.stack([given, given[::-1]])
    np.testing.assert_array_equal(masks.read(batch, (2,))["action_mask"], batch.reshape(2, 6).astype(bool))
    ones = np.array([[1, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(masks.read(ones, (2,))["action_mask"][:, 1::2], ones.astype(bool))
    with pytest.raises(UserError, match="4 entries, but the action has 3 bits; give one entry per bit"):
        masks.read([1, 1, 1, 1])
    with pytest.raises(UserError, match="allows nothing"):
        masks.resolve_empty({"action_mask": np.array([[1, 1, 0, 0, 1, 1]], bool)}, np.array([False]))
    tiled = {"action_mask": np.tile(given.astype(bool).ravel(), (200, 1))}
    drawn = sample_allowed(BITS, tiled, np.random.default_rng(0))
    assert [set(column) for column in drawn["action"].T] == [{0, 1}, {1}, {0}]


def test_masks_of_bits_of_any_shape_and_beside_other_actions():
    actions = Layout(spaces.Dict(a=spaces.Discrete(2), bits=spaces.MultiBinary((2, 2))), "action").specs
    masks = ActionMasks(actions, {"bits": np.ones((2, 2))}, "E")
    assert list(masks.specs) == ["action_mask/bits"]
    read = masks.read({"bits": np.array([[1, 0], [0, 1]])})["action_mask/bits"]
    assert read.tolist() == [True, True, True, False, True, False, True, True]
    drawn = sample_allowed(actions, {"action_mask/bits": read[None]}, np.random.default_rng(0))
    assert {name: x.shape for name, x in drawn.items()} == {"a": (1,), "bits": (1, 2, 2)}


UNITS = spaces.Dict(
    {"units": spaces.Box(-1, 1, (6, 3)), "units/mask": spaces.MultiBinary(6), "map": spaces.Box(0, 1, (8, 8))}
)


def test_axes_follow_from_the_space_and_can_be_set():
    reader = ObservationReader(UNITS, DISCRETE, EnvConfig(axes=("map=image",)), {}, "E")
    assert {name: spec.axes for name, spec in reader.specs.items() if spec.masks is None} == {
        "units": "entities",
        "map": "image",
    }
    assert reader.specs["units/mask"].masks == "units"


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ("mpa=image", 'Did you mean "map"'),
        ("units/mask=vector", "the observations of E are"),
        ("units=clip", "has rank 2, not 3 or 4.*choose vector or entities or image"),
        ("units=grid", "is continuous"),
    ],
)
def test_impossible_axes_are_refused(axes, says):
    with pytest.raises(UserError, match=says):
        ObservationReader(UNITS, DISCRETE, EnvConfig(axes=(axes,)), {}, "E")


@pytest.mark.parametrize(
    ("nvec", "axes", "says"),
    [
        ([[2, 3], [2, 2]], "grid", "different numbers of choices"),
        ([[2, 3], [2, 2]], "entities", "entities with different"),
        ([[2, 2], [2, 2]], "image", "is categorical"),
    ],
)
def test_choices_of_different_sizes_are_no_grid(nvec, axes, says):
    config = EnvConfig(axes=(f"observation={axes}",))
    with pytest.raises(UserError, match=says):
        ObservationReader(spaces.MultiDiscrete(nvec), DISCRETE, config, {}, "E")


def test_max_length_without_lists_is_refused():
    with pytest.raises(UserError, match=r"env.max_length is 9, but no observation of E is a Sequence"):
        ObservationReader(UNITS, DISCRETE, EnvConfig(max_length=9), {}, "E")
    units = spaces.Sequence(spaces.Box(0, 1, (2,)))
    reader = ObservationReader(units, DISCRETE, EnvConfig(max_length=9), {}, "E")
    assert reader.specs["observation"].shape == (9, 2)


PAIR, ONE = spaces.Box(0, 1, (2,), np.float32), spaces.Box(0, 1, (1,), np.float32)


def test_single_lists_have_lengths_of_their_own():
    space = spaces.Dict(g=spaces.Graph(PAIR, ONE), units=spaces.Sequence(PAIR))
    config = EnvConfig(max_length=4, lengths=("g/edges=7", "units=2"))
    reader = ObservationReader(space, DISCRETE, config, {}, "E")
    lists = {name: spec.shape for name, spec in reader.specs.items() if spec.masks is None}
    assert lists == {"g/nodes": (4, 2), "g/edges": (7, 1), "g/edge_links": (7, 2), "units": (2, 2)}
    assert all(reader.specs[f"{name}/mask"].shape == shape[:1] for name, shape in lists.items())
    assert set(reader.specs["g/edge_links"].sizes) == {4}
    links = np.arange(14).reshape(7, 2) % 4  # more edges than nodes
    graph = spaces.GraphInstance(np.ones((4, 2), np.float32), np.ones((7, 1), np.float32), links)
    arrays = reader.read({"g": graph, "units": ()}, {})
    np.testing.assert_array_equal(arrays["g/edge_links"], links)
    assert arrays["g/edges/mask"].all()
    with pytest.raises(UserError, match=r'"units" has 3 elements, but env.lengths units is 2; raise it'):
        reader.read({"g": graph, "units": (np.zeros(2, np.float32),) * 3}, {})
    with pytest.raises(UserError, match=r'"g/edge_links", but the lists of .* E are g/nodes, g/edges, units'):
        ObservationReader(space, DISCRETE, EnvConfig(lengths=("g/edge_links=3",)), {}, "E")
    with pytest.raises(UserError, match=r'names "x", but the lists of variable length of E are none'):
        ObservationReader(UNITS, DISCRETE, EnvConfig(lengths=("x=3",)), {}, "E")


def test_lists_within_alternatives_have_lengths_of_their_own():
    space = spaces.Dict(event=spaces.OneOf([spaces.Dict(a=spaces.Sequence(PAIR)), spaces.Sequence(ONE)]))
    reader = ObservationReader(space, DISCRETE, EnvConfig(lengths=("event/0/a=3", "event/1=5")), {}, "E")
    assert reader.specs["event/0/a"].shape == (3, 2)
    assert reader.specs["event/1"].shape == (5, 1)


ORDERS = Layout(
    spaces.Dict(function=spaces.Discrete(2), target=spaces.Discrete(3), bits=spaces.MultiBinary(2), x=spaces.Box(0, 1)),
    "action",
).specs
GIVEN = {"function": [1, 1], "target": {"function": np.array([[1, 0, 1], [0, 1, 0]])}}


def test_a_mask_may_depend_on_the_choice_of_another_action():
    masks = ActionMasks(ORDERS, GIVEN, "E")
    assert {name: spec.shape for name, spec in masks.specs.items()} == {
        "action_mask/function": (2,),
        "action_mask/target|function": (2, 3),
    }
    assert masks.read(GIVEN)["action_mask/target|function"].tolist() == [[True, False, True], [False, True, False]]
    batch = {"function": np.ones((4, 2)), "target": {"function": np.ones((4, 2, 3)), "_function": np.ones(4)}}
    assert masks.read(batch, (4,))["action_mask/target|function"].shape == (4, 2, 3)
    bits = ActionMasks(ORDERS, {"bits": {"target": np.ones((3, 2))}}, "E")
    read = bits.read({"bits": {"target": np.array([[1, 0], [0, 0], [1, 1]])}})["action_mask/bits|target"]
    assert read.tolist() == [[True, True, True, False], [True, False, True, False], [True, True, True, True]]
    space = spaces.Dict(
        x=spaces.Box(0, 1),
        action_mask=spaces.Dict(target=spaces.Dict(function=spaces.MultiBinary((2, 3)))),
    )
    assert ObservationReader(space, ORDERS, EnvConfig(), {}, "E").specs["action_mask/target|function"].shape == (2, 3)


def test_an_empty_row_of_a_choice_that_is_allowed_is_refused_unless_the_episode_has_ended():
    masks = ActionMasks(ORDERS, GIVEN, "E")
    target = np.array([[[1, 0, 0], [0, 0, 0]]] * 2, bool)
    arrays = {"action_mask/function": np.array([[1, 0], [1, 1]], bool), "action_mask/target|function": target}
    with pytest.raises(
        UserError, match=r'"target" allows nothing \(environment 1\).* each choice of "function" that is'
    ):
        masks.resolve_empty(arrays, np.array([False, False]))
    masks.resolve_empty(arrays, np.array([False, True]))
    assert target[1].all()
    assert target[0].tolist() == [[True, False, False], [False] * 3]


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ({"target": {"function": np.ones((3, 2))}}, "must have 2 rows, one for each choice of"),
        ({"target": {"function": np.ones((2, 4))}}, "has 4 entries, but the action has 3 choices"),
        ({"target": {"target": np.ones((3, 3))}}, "is a dict of target; give one array, or"),
        ({"target": {"x": np.ones((1, 3))}}, "is a dict of x; give"),
        ({"target": {"function": np.ones((2, 3)), "bits": np.ones((2, 3))}}, "is a dict of function, bits"),
        ({"target": {"function": np.ones((2, 3))}, "function": {"target": np.ones((3, 2))}}, "depend on each other"),
    ],
)
def test_impossible_conditions_are_refused(mask, says):
    with pytest.raises(UserError, match=says):
        ActionMasks(ORDERS, mask, "E").read(mask)


def test_samples_follow_the_sampled_choice():
    arrays = {"action_mask/function|target": np.array([[[1, 0], [0, 1], [0, 1]]] * 200, bool)}
    drawn = sample_allowed(ORDERS, arrays, np.random.default_rng(0))
    assert set(drawn["target"]) == {0, 1, 2}
    assert (drawn["function"] == (drawn["target"] > 0)).all()
