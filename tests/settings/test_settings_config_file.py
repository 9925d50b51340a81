import math
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.errors import UserError
from ludus.settings.config_file import read_config, read_origins, render, write_config

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda s: s != "None")
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
values = plain | st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
parts = st.from_regex(r"[a-z_]{1,4}", fullmatch=True) | text.filter(lambda s: s and "." not in s)
names = st.lists(parts, min_size=1, max_size=3).map(".".join)


def unambiguous(found: dict) -> bool:
    return not any(other.startswith(name + ".") for name in found for other in found)


@given(st.dictionaries(names, values, max_size=8).filter(unambiguous), text)
@settings(max_examples=60, deadline=None)
def test_settings_and_origins_round_trip(tmp_path_factory, found, origin):
    path = tmp_path_factory.mktemp("c") / "config.toml"
    write_config(path, found, dict.fromkeys(found, origin))
    back = read_config(path)
    assert back == found
    assert {k: repr(v) for k, v in back.items()} == {
        k: repr(v) for k, v in found.items()
    }  # True is not 1, -0.0 not 0.0
    assert read_origins(path).keys() == found.keys()


def test_format():
    found = {
        "seed": 1,
        "agent.learning_rate": 1e-5,
        "agent.hidden": [64, 64],
        "agent.kl": None,
        "network.body.name": "mlp",
    }
    origins = {"agent.learning_rate": "preset CartPole-v1/ppo", "seed": "flag", "agent.kl": "file # x.toml"}
    assert render(found, origins) == (
        "seed = 1  # flag\n\n[agent]\nlearning_rate = 1e-05  # preset CartPole-v1/ppo\nhidden = [64, 64]  # default\n"
        'kl = "None"  # file # x.toml\n\n[network.body]\nname = "mlp"  # default\n'
    )


def test_origins_with_comment_characters_round_trip(tmp_path):
    path = tmp_path / "config.toml"
    origins = {"a": "flag", "t.b": "preset x/y # 2"}
    write_config(path, {"a": "x  # y", "t.b": math.inf}, origins)
    assert read_origins(path) == origins
    assert read_config(path)["t.b"] == math.inf


def test_numpy_numbers_are_written_as_numbers():
    np = pytest.importorskip("numpy")
    assert tomllib.loads(render({"x": np.float64(0.5)}, {})) == {"x": 0.5}


@pytest.mark.parametrize("bad", [{"a": 1, "a.b": 2}, {"": 1}, {".a": 1}, {"a..b": 1}])
def test_invalid_names_are_refused(bad):
    with pytest.raises(ValueError, match=r"name|setting"):
        render(bad, {})


def test_invalid_values_are_refused():
    with pytest.raises(TypeError, match=r"a\.b"):
        render({"a.b": object()}, {})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\na = oops", "line 2"),
        (b"\xff", "not valid TOML"),
        (b"when = 2020-01-01", "when"),
        (b"[[agent]]\nx = 1", "agent"),
    ],
)
def test_an_invalid_file_is_a_user_error(tmp_path, content, says):
    path = tmp_path / "my.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        read_config(path)
    assert "my.toml" in str(caught.value)


def test_a_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"no\.toml"):
        read_config(tmp_path / "no.toml")
