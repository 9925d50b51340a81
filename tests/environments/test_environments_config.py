from __future__ import annotations

import pytest

from ludus.core.errors import UserError
from ludus.environments.config import EnvConfig, parse_options, parse_wrappers, validate


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
        ({"repeat_seeds": 0}, "env.repeat_seeds is 0"),
        ({"repeat_seeds": 2, "num": 5}, "must be 1 or more and divide env.num, which is 5"),
        ({"repeat_seeds": 2, "backend": "vector"}, "episodes have no seeds of their own"),
        ({"repeat_seeds": 2, "backend": "envpool"}, "episodes have no seeds of their own"),
        ({"id": " "}, "env.id is empty"),
        ({"backend": "vektor"}, 'Did you mean "vector"'),
        ({"options": ("gravity",)}, "not key=value"),
        ({"options": ("a=False",)}, "lower case"),
        ({"options": ("a=1\nb=2",)}, "TOML"),
        ({"options": ("a=1", "a=2")}, "twice"),
        ({"wrappers": ("FrameStack",)}, "not package.module:Wrapper"),
        ({"wrappers": ("a.b:C(",)}, "not a name or name"),
        ({"wrappers": ("a.b:C(4)",)}, "arguments cannot be read as TOML"),
        ({"wrappers": ("a.b:C(x=True)",)}, "arguments cannot be read as TOML"),
        ({"wrappers": ("a.b:C(x=1, x=2)",)}, "arguments cannot be read as TOML"),
        ({"wrappers": ("a.b:C(x=1}\ny={z=1)",)}, "arguments cannot be read as TOML"),
        ({"wrappers": ("a.b:C",), "backend": "vector"}, "backend vector supports no wrappers"),
        ({"wrappers": ("a.b:C",), "backend": "envpool"}, "backend envpool supports no wrappers"),
        ({"max_length": 0}, "env.max_length is 0"),
        ({"lengths": ("units",)}, "not name=number"),
        ({"lengths": ("units=0",)}, "with 1 or more"),
        ({"lengths": ("a=1", "a=2")}, "twice"),
        ({"axes": ("units",)}, "not name=layout"),
        ({"axes": ("=image",)}, "not name=layout"),
        ({"axes": ("units=entity",)}, 'Did you mean "entities"'),
        ({"axes": ("a=image", "a=clip")}, "twice"),
        ({"workers": 2}, "env.workers is 2, but env.backend auto has no worker processes"),
        ({"alternate": True, "backend": "simple"}, "env.alternate is True, but env.backend simple"),
        ({"max_restarts": 3, "backend": "vector"}, "remove env.max_restarts"),
        ({"timeout": 5.0}, "set env.backend to subproc"),
        ({"start": "spawn", "backend": "envpool"}, "env.start is spawn"),
        ({"start": "spwan", "backend": "subproc"}, 'Did you mean "spawn"'),
        ({"workers": -1, "backend": "subproc"}, "env.workers is -1"),
        ({"max_restarts": -1, "backend": "subproc"}, "env.max_restarts is -1"),
        ({"timeout": 0.0, "backend": "subproc"}, "env.timeout is 0"),
        ({"timeout": float("inf"), "backend": "subproc"}, "env.timeout is inf"),
        ({"alternate": True, "num": 1, "backend": "subproc"}, "at least 2 environments"),
    ],
)
def test_invalid_settings_are_refused(settings, says):
    with pytest.raises(UserError, match=says):
        validate(EnvConfig(**settings))


def test_defaults_are_valid():
    validate(EnvConfig())
    validate(EnvConfig(backend="subproc", workers=3, alternate=True, max_restarts=0, timeout=0.5, start="spawn"))


def test_wrappers_are_read_as_toml():
    texts = ("a.b:C", " a:D() ", 'a.b:E(shape=[84, [2]], name="x)", deep={y=1.5}, on=true)')
    assert parse_wrappers(texts) == [
        ("a.b:C", {}),
        ("a:D", {}),
        ("a.b:E", {"shape": (84, (2,)), "name": "x)", "deep": {"y": 1.5}, "on": True}),
    ]
