from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation

from ludus.core.errors import UserError
from ludus.environments.config import EnvConfig
from ludus.environments.gym import find_spec, frame_stack, make, make_environment
from ludus.environments.rows import EnvRows
from ludus.environments.toy import CountingEnv


class Duck:
    """An environment that does not derive from gymnasium.Env."""

    observation_space = gymnasium.spaces.Discrete(3)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 1, 0.5, False, False, {}


def test_make_by_id_with_options_and_time_limit():
    env = make("CartPole-v1", {"sutton_barto_reward": True}, max_episode_steps=3)
    env.reset(seed=0)
    results = [env.step(0) for _ in range(3)]
    assert [r[3] for r in results] == [False, False, True]
    assert results[0][1] == 0  # the option's reward, not the usual 1


def test_make_by_path_and_by_callable():
    env = make("ludus.environments.toy:CountingEnv", {"length": 2})
    assert isinstance(env, CountingEnv)
    assert env.length == 2
    limited = make(CountingEnv, {"length": 9}, max_episode_steps=1)
    limited.reset()
    assert limited.step(0)[2:4] == (False, True)


def test_a_class_with_the_same_methods_is_enough():
    env = make(Duck, max_episode_steps=1)
    assert env.reset(seed=3) == (0, {})
    assert env.step(0)[3] is True


def test_an_id_without_version_is_the_newest():
    assert find_spec("CartPole").id == "CartPole-v1"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("Cartpole-v1",), 'Did you mean "CartPole-v1"'),
        (("CartPole-v7",), 'Did you mean "CartPole-v'),
        (("no_such.mod:Env",), "no module no_such"),
        (("no_such_module:Env-v0",), "needs the module no_such_module"),
        (("ludus.environments.toy:CountinEnv",), 'Did you mean "CountingEnv"'),
        (("ludus.environments.toy:Info",), "without reset"),
        (("LunarLander-v3",), r"gymnasium\[box2d\]"),
        (("phys2d/CartPole-v1",), r"gymnasium\[jax\]"),
        (("CartPole-v1", {"gravty": 1}), "gravty"),
        ((CountingEnv, {"lenght": 1}), 'no option "lenght". Did you mean "length"'),
        ((CountingEnv, {}, 0, "rgb_array"), "takes no render_mode"),
    ],
)
def test_mistakes_are_user_errors(arguments, says):
    with pytest.raises(UserError, match=says):
        make(*arguments)


def test_rendering():
    env = make("ludus.environments.toy:NoVelocityCartPole", render_mode="rgb_array")
    env.reset(seed=0)
    assert np.asarray(env.render()).ndim == 3
    env.close()


def no_wrapper(env):
    return "nothing"


class Doubled(gymnasium.RewardWrapper):
    def __init__(self, env, *, times):
        super().__init__(env)
        self.times = times

    def reward(self, reward):
        return reward * self.times


class Broken(gymnasium.Wrapper):
    def __init__(self, env):
        raise ValueError("it does\nnot fit")


def wrapped(*wrappers, **fields):
    return make_environment(EnvConfig(wrappers=wrappers, **fields))


def test_wrappers_are_applied_in_order():
    stack, flat = "gymnasium.wrappers:FrameStackObservation(stack_size=3)", "gymnasium.wrappers:FlattenObservation"
    assert wrapped(stack).observation_space.shape == (3, 4)
    assert wrapped(stack, flat).observation_space.shape == (12,)
    assert wrapped(flat, stack).observation_space.shape == (3, 4)
    env = wrapped(f"{__name__}:Doubled(times=2)", f"{__name__}:Doubled(times=5)", max_episode_steps=1)
    env.reset(seed=0)
    assert env.step(0)[1:4] == (10, False, True)
    env = wrapped(f"{__name__}:Doubled(times=3)", id=f"{__name__}:Duck")
    env.reset(seed=0)
    assert env.step(0)[1] == 1.5
    own = make_environment(EnvConfig(wrappers=(f"{__name__}:Doubled(times=3)",), options=("length=4",)), CountingEnv)
    assert own.unwrapped.length == 4


@pytest.mark.parametrize(
    ("wrapper", "says"),
    [
        ("gymnasium.wrappers:FrameStackObservation", "needs stack_size; write it like .*stack_size=VALUE"),
        (
            "gymnasium.wrappers:FrameStackObservation(stack_siez=4)",
            'no argument "stack_siez". Did you mean "stack_size"',
        ),
        ("gymnasium.wrappers:FrameStackObservatio(stack_size=4)", 'Did you mean "FrameStackObservation"'),
        ("no_such_module:Wrapper", "no module no_such_module"),
        (f"{__name__}:Doubled", "needs times"),
        (f"{__name__}:Broken", "raised ValueError: it does not fit; fix its arguments"),
        (f"{__name__}:no_wrapper", "returned a str, not an environment"),
        ("sys:path", "is a list, not a class"),
    ],
)
def test_mistakes_in_wrappers_are_user_errors(wrapper, says):
    with pytest.raises(UserError, match=says) as caught:
        wrapped(wrapper)
    assert "\n" not in str(caught.value)


def test_environment_side_needs_no_torch():
    code = (
        "import sys, ludus.environments.check, ludus.environments.rows, ludus.environments.toy;"
        "import ludus.preprocess.actions;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


def test_a_frame_stack_is_recognized_unless_another_wrapper_may_change_it() -> None:
    def frames(*wrappers: Any) -> int:
        env: Any = Picture()
        for wrap in wrappers:
            env = wrap(env)
        return frame_stack(env, "observation")

    stacked = lambda env: FrameStackObservation(env, 4)  # noqa: E731
    assert frames() == 1
    assert frames(stacked) == 4
    assert frames(stacked, lambda env: gymnasium.wrappers.TimeLimit(env, 9)) == 4
    assert frames(stacked, Dimming) == 1
    assert frames(stacked, lambda env: gymnasium.wrappers.FlattenObservation(env)) == 1
    rows = EnvRows(lambda: stacked(Picture()), 0, 1, "Picture")
    assert rows.observation["observation"].stack == 4
    rows.close()


class Picture(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 255, (8, 9), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, False, {}


class Dimming(gymnasium.Wrapper[Any, Any, Any, Any]):
    """May change frames, though its space is the same."""
