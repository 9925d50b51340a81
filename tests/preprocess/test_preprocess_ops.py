import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.containers.build import build_agent, build_manager
from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.networks.numpy_actor import is_plain_vector
from ludus.preprocess.config import PreprocessConfig, split_calls
from ludus.preprocess.normalization import ObsNormalizer
from ludus.preprocess.observation import ObsPreprocessor
from ludus.preprocess.pipeline import with_device_ops
from ludus.settings.networks import plan_networks
from ludus.settings.settings import resolve_settings

T, B = 3, 2
VECTOR = Spec((4,), "float32", low=-100.0, high=100.0)
SPECS = {
    "arm/position": VECTOR,
    "arm/speed": Spec((2,), "float64", low=(-1.0, -2.0), high=(1.0, 2.0)),
    "level": Spec((), "int64", "categorical", sizes=(5,)),
    "door": Spec((3,), "int8", "binary"),
    "camera": Spec((6, 5, 2), "uint8", low=0, high=255),
    "list": Spec((3, 2), "float32"),
    "action_mask": Spec((2,), "bool", "binary"),
}


def made(*pipeline, specs=SPECS):
    return ObsPreprocessor(with_device_ops(specs, pipeline))


def draw(spec, seed=0):
    random = np.random.default_rng(seed)
    if spec.kind == "categorical":
        x = random.integers(0, np.reshape(spec.sizes, spec.shape), (T, B, *spec.shape))
    elif spec.kind == "binary":
        x = random.integers(0, 2, (T, B, *spec.shape))
    else:
        low, high = spec.bounds
        x = np.clip(random.uniform(-100, 300, (T, B, *spec.shape)), low, high)
    return torch.from_numpy(np.asarray(x).astype(spec.dtype))


def test_numbers_equal_their_definition_in_float64():
    x = draw(VECTOR)
    ready = made("x: scale(by=0.5, offset=1), clip(low=-3, high=4), symlog", specs={"x": VECTOR})({"x": x})["x"]
    expected = np.clip(x.numpy().astype(np.float64) * 0.5 + 1, -3, 4)
    np.testing.assert_allclose(ready, np.sign(expected) * np.log1p(np.abs(expected)), rtol=1e-5)
    assert ready.dtype == torch.float32
    assert made("x: symlog", specs={"x": VECTOR})({"x": torch.zeros(1, 1, 4)})["x"].tolist() == [[[0.0] * 4]]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 4), max_size=3),
    st.sampled_from(["float32", "float64", "uint8", "int32"]),
    st.lists(st.sampled_from(["scale(by=-2, offset=1)", "clip(low=-1, high=2)", "symlog", "flatten"]), max_size=4),
    st.integers(0, 99),
)
def test_shapes_and_bounds_of_specs_are_those_of_tensors(shape, dtype, ops, seed):
    from ludus.preprocess.chain import make_chain

    spec = Spec(tuple(shape), dtype, low=0, high=200)
    chain = make_chain("x", with_device_ops({"x": spec}, [f"x: {op}" for op in ops])["x"])
    x = draw(spec, seed)
    for op in chain.ops:
        x = op(x)
    low, high = chain.output.bounds
    assert x.shape == (T, B, *chain.output.shape)
    assert x.dtype == getattr(torch, chain.output.dtype)
    assert (x.numpy() >= low - 1e-4).all()
    assert (x.numpy() <= high + 1e-4).all()


def test_a_choice_can_be_taken_for_a_number_and_a_number_for_a_choice():
    level = draw(SPECS["level"])
    one = made('level: cast(dtype="float32"), scale(by=0.25)')({**everything(), "level": level})["level"]
    assert torch.equal(one, level.float().unsqueeze(-1) * 0.25)
    counted = {"x": Spec((2,), "int32", low=0, high=3)}
    x = torch.tensor([[[0, 3], [1, 2]]], dtype=torch.int32)
    hot = made("x: one_hot", specs=counted)({"x": x})["x"]
    assert torch.equal(hot, torch.nn.functional.one_hot(x.long(), 4).float().flatten(-2))
    assert not ObsNormalizer(made("x: one_hot", specs=counted).outputs).statistics
    assert made("x: one_hot(size=7)", specs={"x": Spec((2,), "int32")}).shapes == {"x": (14,)}


def everything():
    return {name: draw(spec) for name, spec in SPECS.items()}


def test_observations_are_renamed_joined_and_dropped():
    pipeline = ('arm/*: concat(to="arm")', 'camera: channels_first, rename(to="eye")', "eye: flatten", "door: drop")
    preprocess = made(*pipeline)
    assert preprocess.shapes == {"arm": (6,), "level": (5,), "eye": (60,), "list": (2, 3)}
    given = everything()
    ready = preprocess(given)
    joined = torch.cat([given["arm/position"], given["arm/speed"].float()], -1)
    assert torch.equal(ready["arm"], joined)
    assert torch.equal(ready["eye"], given["camera"].movedim(-1, -3).flatten(-3).float())
    assert list(ObsNormalizer(preprocess.outputs).statistics) == [
        "observation/arm",
        "observation/eye",
        "observation/list",
    ]


def test_padding_is_zero_and_keeps_the_rest():
    spec = {"x": Spec((2, 3), "float32", low=1.0, high=2.0, axes="image")}
    x = torch.rand(T, B, 2, 3) + 1
    padded = made("x: pad(shape=[4, 5])", specs=spec).ops[0](x)
    assert padded.shape == (T, B, 4, 5)
    assert torch.equal(padded[..., :2, :3], x)
    assert padded.sum() == pytest.approx(float(x.sum()))


def test_patterns_apply_in_order_and_never_to_masks():
    specs = with_device_ops(SPECS, ["arm/*: symlog", "arm/speed: clip(low=0, high=1)", "level: drop"])
    assert specs["arm/position"].ops == ("symlog",)
    assert specs["arm/speed"].ops == ("symlog", "clip(low=0, high=1)")
    assert not with_device_ops(SPECS, ["flatten"])["action_mask"].ops
    with pytest.raises(UserError, match="the observations are"):
        with_device_ops(SPECS, ["action_mask: drop"])


def test_numpy_acting_is_left_where_ops_apply():
    assert is_plain_vector(made(specs={"x": VECTOR}))
    assert not is_plain_vector(made("x: symlog", specs={"x": VECTOR}))


def test_commas_inside_brackets_and_quotes_do_not_split():
    assert split_calls('pad(shape=[1, 2]), rename(to="a,b") , flatten') == [
        "pad(shape=[1, 2])",
        'rename(to="a,b")',
        "flatten",
    ]


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("level: symlog", r'"symlog" cannot be applied to observation "level", categorical int64 of shape \(\): it is'),
        ('camera: concat(to="x")', "put flatten before it"),
        ("camera: scale", "missing 1 required keyword-only argument: 'by'"),
        ("camera: clip(low=true, high=2)", "low is True, but must be a number"),
        ("camera: clip(lo=1, high=2)", r'has no argument "lo": its arguments are low, high. Did you mean "low"\?'),
        ('camera: cast(dtype="int7")', 'dtype is "int7", but must be one of float32, uint8'),
        ("arm/position: one_hot", "give the number of choices"),
        ("arm/position: one_hot(size=-3)", "must be a whole number of 1 or more"),
        ('arm/position: cast(dtype="uint8")', "not all from 0 to 255"),
        ("level: one_hot", "one-hot encoded already"),
        ("door: one_hot", "0 or 1 already"),
        ("arm/speed: channels_first", r"of shape \(2,\): it takes images"),
        ("arm/speed: pad(shape=[1])", "none of them smaller"),
        ("door: rename(to=1)", "to is 1, but must be text in quotes"),
        ('door: rename(to="camera")', 'two observations, "door" and "camera", the name "camera"'),
        ('arm/*: concat(to="s"), door: concat(to="s")', "not a name or name"),
    ],
)
def test_ops_that_do_not_fit_are_refused(op, message):
    with pytest.raises(UserError, match=message):
        made(op)


def test_kinds_are_not_mixed_and_something_is_left():
    with pytest.raises(UserError, match=r'joins "arm/position" \(continuous\) and "door" \(binary\)'):
        made('arm/position: concat(to="s")', 'door: concat(to="s")')
    with pytest.raises(UserError, match="drops every observation"):
        made("drop")
    with pytest.raises(UserError, match=r"no op \"os\.system\""):
        PreprocessConfig(("camera: os.system",)).validate()
    with pytest.raises(UserError, match="which is not a name"):
        PreprocessConfig(("camera: ",)).validate()


LISTS = {
    "units": Spec((4, 3), "float32", low=-1.0, high=1.0),
    "units/mask": Spec((4,), "bool", "binary", masks="units"),
    "board": Spec((3, 3), "int8", "categorical", sizes=(5,) * 9),
    "grey": Spec((6, 5), "uint8", low=0, high=255),
}


def test_ops_on_lists_grids_and_images():
    plain = made(specs=LISTS)
    assert plain.shapes == {"units": (3, 4), "board": (3, 3), "grey": (1, 6, 5)}
    assert (plain.masks, plain.categories) == ({"units": "units/mask"}, {"board": 5})
    pipeline = (
        'units: scale(by=2, offset=1), rename(to="army")',
        'board: cast(dtype="float32")',
        "grey: scale(by=0.1)",
    )
    changed = made(*pipeline, specs=LISTS)
    assert changed.shapes == {"army": (3, 4), "board": (3, 3), "grey": (1, 6, 5)}  # numbers on a board are features
    assert (changed.masks, changed.categories) == ({"army": "units/mask"}, {})
    x = {name: draw(spec) for name, spec in LISTS.items()}
    ready = changed(x)
    mask = x["units/mask"]
    expected = torch.where(mask.unsqueeze(-1), x["units"] * 2 + 1, 0).mT  # what was added to the padding is cleared
    assert torch.equal(ready["army"], expected)
    assert torch.equal(ready["units/mask"], mask)
    flat = made("flatten", specs=LISTS)
    assert flat.shapes == {"units": (12,), "board": (45,), "grey": (30,)}
    assert (flat.masks, list(flat(x))) == ({}, ["units", "board", "grey"])
    assert made("units: drop", specs=LISTS).masks == {}


def test_a_longer_list_gets_a_mask():
    x = {name: draw(spec) for name, spec in SPECS.items()}
    padded = made('list: pad(shape=[5, 3]), scale(by=2, offset=1), rename(to="army")')
    assert padded.shapes["army"] == (3, 5)
    assert padded.masks == {"army": "army/mask"}
    assert (padded.outputs["army/mask"].masks, padded.outputs["army/mask"].shape) == ("army", (5,))
    ready = padded(x)
    assert ready["army/mask"].tolist() == [[[True] * 3 + [False] * 2] * B] * T
    assert torch.equal(ready["army"][..., :2, :3], x["list"].mT * 2 + 1)
    assert not ready["army"][..., 3:].any()
    assert made("list: pad(shape=[5, 3]), flatten").masks == {}
    assert made("list: pad(shape=[3, 4])").masks == {}


def test_the_mask_of_a_padded_list_gets_longer():
    x = {name: draw(spec) for name, spec in LISTS.items()}
    padded = made("units: pad(shape=[6, 3])", specs=LISTS)
    ready = padded(x)
    assert padded.shapes["units"] == (3, 6)
    assert torch.equal(ready["units/mask"][..., :4], x["units/mask"])
    assert not ready["units/mask"][..., 4:].any()
    normalizer = ObsNormalizer(padded.outputs)
    normalizer.update(ready, torch.ones(T, B))
    assert int(normalizer.statistics["observation/units"].count) == int(x["units/mask"].sum())
    assert made("units: pad(shape=[4, 5])", specs=LISTS).shapes["units"] == (5, 4)
    with pytest.raises(UserError, match=r"the observations are units, board, grey\."):
        made("units/mask: drop", specs=LISTS)
    taken = {"x": Spec((3, 2), "float32"), "x/mask": Spec((2,), "float32")}
    with pytest.raises(UserError, match='makes the mask "x/mask", an observation already'):
        made("x: pad(shape=[4, 2])", specs=taken)


def test_networks_see_observations_by_their_new_names():
    changes = {"preprocess.observation": ('observation: rename(to="state")', "previous_action"), "nb_step": 2_000}
    changes |= {"network.actor.sees": ("state",)}
    resolved = resolve_settings("CartPole-v1", "ppo", "none", None, changes)
    manager = build_manager(resolved.settings)
    plans = plan_networks(resolved.settings, manager.observation, manager.action, shared=False)
    assert list(plans["actor"].spec.inputs) == ["state"]
    assert list(plans["critic"].spec.inputs) == ["state", "previous_action"]
    manager.close()


def test_specs_import_nothing_but_ops() -> None:
    with pytest.raises(UserError, match="is not one of"):  # as in the failure dump of another user's run
        ObsPreprocessor({"x": Spec((2,), "float32", ops=("tests.missing:Class",))})


def test_padding_is_no_choice():
    specs = with_device_ops({"units": Spec((3, 2), "float32")}, ["pad(shape=[5, 2])"])
    changes = {"agent.heads": ("action=pointer(units)",), "nb_step": 2_000, "network.net2d": "entity_mlp"}
    chosen = resolve_settings("CartPole-v1", "ppo", "none", None, changes).settings
    with pytest.raises(UserError, match=r'agent\.heads chooses entities of "units", to which a pad'):
        build_agent(chosen, specs, {"action": Spec((), "int64", "categorical", sizes=(5,))}, torch.device("cpu"))
