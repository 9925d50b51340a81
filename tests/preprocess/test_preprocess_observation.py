import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from ludus.core.errors import UserError
from ludus.core.spec import Spec, axes_problem
from ludus.preprocess.observation import ObsPreprocessor

T, B = 3, 2


def through(spec, x):
    preprocess = ObsPreprocessor({"x": spec})
    y = preprocess({"x": x})["x"]
    assert y.shape == (T, B, *preprocess.shapes["x"])
    assert y.dtype == torch.float32
    return y


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 99))
def test_choices_become_one_hot_vectors(sizes, seed):
    torch.manual_seed(seed)
    x = torch.stack([torch.randint(n, (T, B)) for n in sizes], -1)
    y = through(Spec((len(sizes),), "int64", "categorical", sizes=tuple(sizes)), x)
    expected = torch.cat([one_hot(x[..., i], n) for i, n in enumerate(sizes)], -1)
    assert torch.equal(y, expected.float())


def test_a_single_choice_and_a_grid_of_choices():
    x = torch.tensor([[0, 2], [1, 1], [2, 0]])
    assert torch.equal(through(Spec((), "int64", "categorical", sizes=(3,)), x), one_hot(x, 3).float())
    board = torch.randint(2, (T, B, 2, 2))
    y = through(Spec((2, 2), "int32", "categorical", sizes=(2, 2, 2, 2), axes="vector"), board.int())
    assert torch.equal(y, one_hot(board, 2).reshape(T, B, 8).float())
    y = through(Spec((2, 2), "int64", "categorical", sizes=(2, 3, 2, 2)), board)  # no grid: sizes differ
    assert y.shape == (T, B, 9)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_grids_stay_integers(dtype):
    grid = torch.randint(5, (T, B, 4, 3)).to(dtype)
    spec = Spec((4, 3), str(dtype).removeprefix("torch."), "categorical", sizes=(5,) * 12)
    preprocess = ObsPreprocessor({"x": spec})
    y = preprocess({"x": grid})["x"]
    assert (preprocess.shapes, preprocess.categories) == ({"x": (4, 3)}, {"x": 5})
    assert y.dtype == torch.int64
    assert torch.equal(y, grid.long())
    assert (y is grid) == (dtype == torch.int64)


def test_lists_are_features_first_and_their_padding_is_zero():
    specs = {
        "units": Spec((4, 3), "float64"),
        "words": Spec((5,), "int64", "categorical", sizes=(6,) * 5, axes="entities"),
        "units/mask": Spec((4,), "int8", "binary", masks="units"),
        "words/mask": Spec((5,), "bool", "binary", masks="words"),
    }
    preprocess = ObsPreprocessor(specs)
    assert preprocess.shapes == {"units": (3, 4), "words": (6, 5)}
    assert preprocess.masks == {"units": "units/mask", "words": "words/mask"}
    x = {
        "units": torch.rand(T, B, 4, 3, dtype=torch.float64) + 1,  # the environment left something in the padding
        "words": torch.randint(6, (T, B, 5)),
        "units/mask": (torch.rand(T, B, 4) < 0.5).to(torch.int8),
        "words/mask": torch.rand(T, B, 5) < 0.5,
    }
    y = preprocess(x)
    assert (y["units/mask"].dtype, y["words/mask"].dtype) == (torch.bool, torch.bool)
    expected = torch.where(x["units/mask"].bool()[..., None], x["units"].float(), 0).transpose(-1, -2)
    assert torch.equal(y["units"], expected)
    assert torch.equal(y["words"].sum(-2), x["words/mask"].float())
    assert torch.equal(y["words"].argmax(-2)[x["words/mask"]], x["words"][x["words/mask"]])


@pytest.mark.parametrize(
    ("spec", "axes", "shape"),
    [
        (Spec((6, 3), "float32"), "entities", (3, 6)),
        (Spec((6, 3), "int8", "binary"), "entities", (3, 6)),
        (Spec((6, 3), "float32", axes="vector"), "vector", (18,)),
        (Spec((6, 3), "float32", axes="image"), "image", (1, 6, 3)),
        (Spec((8, 9), "uint8", low=0, high=255), "image", (1, 8, 9)),
        (Spec((8, 9), "uint8", low=0, high=7), "entities", (9, 8)),
        (Spec((4, 8, 9), "uint8", low=0, high=255), "image", (4, 8, 9)),
        (Spec((4, 8, 9), "uint8", low=0, high=255, axes="clip"), "clip", (1, 4, 8, 9)),
        (Spec((5, 8, 9, 3), "uint8", low=0, high=255), "clip", (3, 5, 8, 9)),
        (Spec((5, 3, 8, 9), "uint8", low=0, high=255), "clip", (3, 5, 8, 9)),
        (Spec((5, 3, 8, 9), "uint8", low=0, high=255, stack=5), "image", (15, 8, 9)),
        (Spec((2, 5, 8, 9), "float32"), "clip", (2, 5, 8, 9)),
        (Spec((3, 3), "int64", "categorical", sizes=(4,) * 9, axes="entities"), "entities", (12, 3)),
        (Spec((1,) * 5, "float32", axes="vector"), "vector", (1,)),
    ],
)
def test_axes_decide_the_shape(spec, axes, shape):
    assert spec.axes == axes
    assert axes_problem(spec, axes) == ""
    assert ObsPreprocessor({"x": spec}).shapes == {"x": shape}


def test_a_movie_keeps_its_frames_in_order():
    x = torch.randint(0, 256, (T, B, 5, 8, 9, 3), dtype=torch.uint8)
    y = through(Spec((5, 8, 9, 3), "uint8", low=0, high=255), x)
    torch.testing.assert_close(y[1, 1, 2, 4], x[1, 1, 4, :, :, 2] / 255)
    first = through(Spec((5, 3, 8, 9), "uint8", low=0, high=255), x.movedim(-1, -3).contiguous())
    assert torch.equal(first, y)


def test_scalars_become_float32_vectors():
    x = torch.rand(T, B, dtype=torch.float64)
    assert torch.equal(through(Spec((), "float64"), x), x.float().unsqueeze(-1))
    assert torch.equal(through(Spec((4,), "int32"), torch.full((T, B, 4), 7).int()), torch.full((T, B, 4), 7.0))
    bits = torch.rand(T, B, 3) < 0.5
    assert torch.equal(through(Spec((3,), "bool", "binary"), bits), bits.float())
    assert torch.equal(through(Spec((), "int8", "binary"), bits[..., 0].to(torch.int8)), bits[..., :1].float())


def test_float32_vectors_are_not_copied():
    x = torch.rand(T, B, 4)
    assert ObsPreprocessor({"x": Spec((4,), "float32")})({"x": x})["x"] is x


def test_images_are_scaled_to_0_to_1():
    x = torch.randint(0, 256, (T, B, 4, 8, 9), dtype=torch.uint8)
    torch.testing.assert_close(through(Spec((4, 8, 9), "uint8", low=0, high=255), x), x.float() / 255)


def test_channels_last_images_are_permuted_without_a_copy():
    x = torch.randint(0, 256, (T, B, 8, 9, 3), dtype=torch.uint8)
    y = through(Spec((8, 9, 3), "uint8", low=0, high=255), x)
    assert y.shape == (T, B, 3, 8, 9)
    torch.testing.assert_close(y[1, 1, 2], x[1, 1, :, :, 2].float() / 255)
    assert y.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    floats = torch.rand(T, B, 8, 9, 1)
    assert through(Spec((8, 9, 1), "float32"), floats).data_ptr() == floats.data_ptr()


@pytest.mark.parametrize("shape", [(3, 64, 4), (4, 84, 84), (1, 5, 3), (16, 3, 3)])
def test_other_shapes_are_not_permuted(shape):
    assert ObsPreprocessor({"x": Spec(shape, "float32")}).shapes == {"x": shape}


def test_masks_are_dropped_and_any_name_is_valid():
    specs = {"a.b/items": Spec((2,), "float32"), "keys": Spec((), "int64", "categorical", sizes=(3,))}
    masked = specs | {"action_mask": Spec((5,), "bool", "binary"), "action_mask/x": Spec((5,), "bool", "binary")}
    preprocess = ObsPreprocessor(masked)
    assert preprocess.shapes == {"a.b/items": (2,), "keys": (3,)}
    x = {"a.b/items": torch.zeros(T, B, 2), "keys": torch.zeros(T, B, dtype=torch.int64), "action_mask": torch.ones(1)}
    assert list(preprocess(x)) == list(specs)
    assert preprocess.state_dict() == {}


def test_more_than_four_dimensions_raise():
    with pytest.raises(UserError, match=r'"x".*ranks 0 to 4'):
        ObsPreprocessor({"x": Spec((1,) * 5, "float32", low=-np.inf)})


def test_one_hot_on_the_meta_device():
    """Networks are built on the meta device to estimate their size."""
    with torch.device("meta"):
        outline = ObsPreprocessor({"observation": Spec((2,), "int64", "categorical", sizes=(2, 3))})
    assert {tuple(x.shape) for x in outline.buffers()} == {(5,)}


@pytest.mark.parametrize("layout", [{"axes": "vector"}, {"axes": "entities", "ops": ("flatten",)}])
def test_padding_of_a_flattened_list_is_zero(layout):
    mask = Spec((4,), "int8", "binary", masks="units")
    preprocess = ObsPreprocessor({"units": Spec((4, 2), "float32", **layout), "units/mask": mask})
    present = torch.tensor([1, 0, 0, 1], dtype=torch.int8).expand(T, B, 4)
    x = torch.full((T, B, 4, 2), 7.0)
    x[:, :, 1:3] = torch.nan
    expected = torch.tensor([7.0, 7.0, 0.0, 0.0, 0.0, 0.0, 7.0, 7.0]).expand(T, B, 8)
    assert torch.equal(preprocess({"units": x, "units/mask": present})["units"], expected)
