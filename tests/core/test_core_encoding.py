import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.encoding import TensorFile, decode, encode, serialize

plain = st.none() | st.booleans() | st.integers() | st.integers(2**60, 2**130) | st.floats() | st.text(max_size=6)
keys = (
    st.text(max_size=6)
    | st.sampled_from(["$", "$float", "$tensor", "$$", "$5", "a/b", "__metadata__", ""])
    | st.integers()
)
states = st.dictionaries(
    keys, st.recursive(plain, lambda s: st.lists(s, max_size=3) | st.dictionaries(keys, s, max_size=3), max_leaves=12)
)


def same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(states)
@settings(max_examples=60, deadline=None)
def test_plain_values_come_back_as_they_were_through_strict_json(state):
    text = json.dumps(encode(state, {}), allow_nan=False)
    assert same(decode(json.loads(text), {}), state)


def test_tensors_of_one_path_do_not_overwrite_each_other():
    state = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), 0: torch.tensor(3), "0": torch.tensor(4)}
    tensors = {}
    back = decode(encode({"top": state, "__metadata__": torch.tensor(5)}, tensors), tensors)
    assert len(tensors) == 5
    assert "__metadata__" not in tensors
    assert (back["top"]["a"]["b"], back["top"]["a/b"], back["top"][0], back["top"]["0"]) == (1, 2, 3, 4)


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_numpy_generators_continue_exactly(bits):
    generator = np.random.Generator(bits(7))
    generator.random(3)
    tensors = {}
    tree = json.loads(json.dumps(encode(generator.bit_generator.state, tensors)))
    expected = generator.random(5)
    other = np.random.Generator(bits(1))
    other.bit_generator.state = decode(tree, tensors)
    assert (other.random(5) == expected).all()


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        b"bytes",
        {True: 1},
        {1.5: 1},
        np.array(["a"]),
        1j,
        np.longdouble(1),
        torch.zeros(1, dtype=torch.complex128),
        torch.eye(2).to_sparse(),
    ],
)
def test_what_cannot_be_held_is_named_with_its_place(value):
    with pytest.raises(TypeError, match="agent/x"):
        encode({"agent": {"x": value}}, {})


def test_an_optimizer_comes_back_as_torch_wrote_it():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    tensors = {}
    back = decode(json.loads(json.dumps(encode(optimizer.state_dict(), tensors))), tensors)
    assert 0 in back["state"]
    other = torch.optim.Adam([weight])
    other.load_state_dict(back)
    assert torch.equal(other.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"])


def test_files_are_those_of_the_safetensors_library(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b/c": torch.arange(5), "empty": torch.zeros(0, 2), "flag": torch.tensor(True)}
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    ours.write_bytes(b"".join(serialize(tensors)))
    safetensors.torch.save_file(tensors, theirs)
    torch.testing.assert_close(safetensors.torch.load_file(ours), tensors, rtol=0, atol=0)
    with theirs.open("rb", buffering=0) as file:
        torch.testing.assert_close(TensorFile(file).read(tensors), tensors, rtol=0, atol=0)
