"""Errors and warnings of SimpleEnvManager for environments that break the Gymnasium API."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from ludus.core.errors import UserError
from ludus.environments.infos import numeric_info, numeric_info_row
from ludus.managers.simple import SimpleEnvManager


class Env(gymnasium.Env):
    def __init__(self, space, later, reward=1, step=None):
        self.observation_space, self.action_space = space, spaces.Discrete(2, start=5)
        self.later, self.reward, self.whole = later, reward, step
        self.actions = []

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        self.actions.append(action)
        return self.whole or (self.later, self.reward, False, np.True_, {})


BOX = spaces.Box(-1, 1, (2,), np.float32)
ACTION = {"action": torch.tensor([1])}


def stepped(*args, **kwargs):
    env = Env(*args, **kwargs)
    manager = SimpleEnvManager(lambda: env, 1, "MyEnv")
    manager.reset(0)
    return env, manager.step(ACTION)


@pytest.mark.parametrize(
    ("space", "later", "says"),
    [
        (BOX, np.zeros(3, np.float32), r'MyEnv: observation "observation" is float32 of shape \(3,\).*shape \(2,\)'),
        (BOX, np.zeros(2, np.int64), 'MyEnv: observation "observation" is int64 .*is float32'),
        (BOX, np.zeros(3), "float64 of shape"),
        (BOX, None, "object"),
        (spaces.Dict(a=BOX), {"b": np.zeros(2, np.float32)}, r"has the parts \['b'\], but its space has \['a'\]"),
        (spaces.Dict(a=BOX), {"a": np.zeros((1, 2), np.float32)}, '"a" is float32 of shape'),
        (spaces.Discrete(3), 1.5, "float64"),
        (spaces.Discrete(3), np.array([1]), r"shape \(1,\)"),
    ],
)
def test_observations_that_do_not_match_their_space_raise(space, later, says):
    with pytest.raises(UserError, match=says):
        stepped(space, later)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"reward": "many"}, "reward is of type str, which is not a number; return the reward as a float"),
        ({"reward": None}, "reward is of type NoneType"),
        ({"reward": np.zeros(2)}, "not a number"),
        ({"reward": np.zeros(1)}, "not a number"),
        ({"reward": torch.zeros(1)}, "not a number"),
        ({"reward": np.array(None)}, "not a number"),
        ({"step": (np.zeros(2, np.float32), 0.0, False, {})}, "step returned 4 values"),
    ],
)
def test_invalid_steps_raise(kwargs, says):
    with pytest.raises(UserError, match=says):
        stepped(BOX, np.zeros(2, np.float32), **kwargs)


def test_old_reset_api_raises():
    class Old(Env):
        def reset(self, **_):
            return np.zeros(2, np.float32)

    with pytest.raises(UserError, match="reset returned a ndarray"):
        SimpleEnvManager(lambda: Old(BOX, None), 1, "MyEnv")


@pytest.mark.parametrize(
    ("space", "later", "found"),
    [
        (BOX, [0.5, 1.0], [0.5, 1.0]),
        (spaces.Discrete(3, start=-1), np.int32(1), 2),
        (spaces.Discrete(3), 2, 2),
        (spaces.MultiBinary(2), np.array([1, 0], np.int8), [1, 0]),
    ],
)
@pytest.mark.parametrize("reward", [1, True, np.float64(1), np.int64(1)])
def test_harmless_deviations_are_accepted(space, later, found, reward):
    env, step = stepped(space, later, reward=reward)
    assert step.observation["observation"][0].tolist() == found
    assert step.reward.tolist() == [1]
    assert step.truncated.tolist() == [True]
    assert env.actions == [6]  # counted from 0 here, from 5 there


@pytest.mark.parametrize(
    ("space", "later", "read"),
    [
        (BOX, np.array([0.1, 0.2]), lambda step: step.observation["observation"]),
        (spaces.Dict(a=BOX), {"a": np.array([0.1, 0.2])}, lambda step: step.observation["a"]),
    ],
)
def test_wide_floats_are_cast_with_one_warning(space, later, read):
    env = Env(space, later)
    manager = SimpleEnvManager(lambda: env, 1, "MyEnv")
    said = []
    manager.on_warning = said.append
    manager.reset(0)
    for _ in range(4):  # every second step is a reset, which gives float32
        step = manager.step(ACTION)
        if not step.first[0]:
            np.testing.assert_array_equal(read(step)[0].numpy(), np.array([0.1, 0.2], np.float32))
        manager.episodes()
    assert len(said) == 1
    assert "MyEnv: observations come in a wider float type" in said[0]


@pytest.mark.parametrize("reward", [np.array(1.5), np.array(1.5, np.float32), torch.tensor(1.5)])
def test_zero_dimensional_reward_is_accepted_with_one_warning(reward):
    manager = SimpleEnvManager(lambda: Env(BOX, np.zeros(2, np.float32), reward=reward), 2, "MyEnv")
    said = []
    manager.on_warning = said.append
    manager.reset(0)
    for _ in range(3):
        step = manager.step({"action": torch.tensor([1, 1])})
        assert step.first.all() or step.reward.tolist() == [1.5, 1.5]
        manager.episodes()
    assert len(said) == 1
    assert "the reward is an array without dimensions" in said[0]


def test_evaluation_does_not_repeat_warnings():
    manager = SimpleEnvManager(lambda: Env(BOX, np.zeros(2)), 1, "MyEnv", branch=1)
    said = []
    manager.on_warning = said.append
    manager.reset(0)
    manager.step(ACTION)
    manager.episodes()
    assert said == []


def test_numeric_infos():
    info = {"a": 1, "b": {"c": np.float32(2)}, "d": "x", "e": np.array([3.0]), "f": np.zeros(2), "g": True}
    assert numeric_info(info) == {"a": 1, "b/c": 2, "e": 3, "g": 1}
    infos = {
        "a": np.array([1, 0]),
        "_a": np.array([True, False]),
        "b": {"c": np.array([2.0, 5.0]), "_c": np.array([True, True])},
        "_b": np.array([True, True]),
        "name": np.array(["x", None], object),
    }
    assert numeric_info_row(infos, 0) == {"a": 1, "b/c": 2}
    assert numeric_info_row(infos, 1) == {"b/c": 5}
