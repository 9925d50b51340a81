from __future__ import annotations

import pytest

from ludus.core.errors import UserError
from ludus.environments.config import EnvConfig, parse_options, validate


def test_options_are_read_as_toml():
    assert parse_options(('a="x"', "b=[1, 2]", "c=true", "d=-5.5", "e = 3")) == {
        "a": "x", "b": [1, 2], "c": True, "d": -5.5, "e": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num": 0}, "env.num is 0"),
        ({"num": -3}, "env.num is -3"),
        ({"max_episode_steps": -1}, "env.max_episode_steps is -1"),
        ({"id": " "}, "env.id is empty"),
        ({"backend": "vektor"}, 'Did you mean "vector"'),
        ({"options": ("gravity",)}, "not key=value"),
        ({"options": ("a=False",)}, "lower case"),
        ({"options": ("a=1\nb=2",)}, "TOML"),
        ({"options": ("a=1", "a=2")}, "twice"),
    ],
)
def test_bad_settings_are_refused(settings, says):
    with pytest.raises(UserError, match=says):
        validate(EnvConfig(**settings))


def test_defaults_are_valid():
    validate(EnvConfig())
