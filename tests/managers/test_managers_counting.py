"""The counting environment in every manager, compared step by step with expected values."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ludus.core.errors import UserError
from ludus.environments.toy import CountingEnv
from ludus.managers.simple import SimpleEnvManager
from ludus.managers.vector import VectorEnvManager

LENGTHS = (1, 2, 5)


def simple(ending):
    lengths = iter(LENGTHS)
    return SimpleEnvManager(lambda: CountingEnv(next(lengths), ending), len(LENGTHS), "counting")


def vector(ending):
    env = SyncVectorEnv([lambda n=n: CountingEnv(n, ending) for n in LENGTHS])
    return VectorEnvManager(env, "counting")


ACTION = {"action": torch.zeros(len(LENGTHS), dtype=torch.int64)}


@pytest.mark.parametrize("make", [simple, vector])
@pytest.mark.parametrize("ending", ["termination", "truncation"])
def test_steps_equal_expected_values(make, ending):
    manager = make(ending)
    for time in range(40):
        step = manager.reset(7) if time == 0 else manager.step(ACTION)
        if time == 0:  # the environment numbers its episodes itself, and counts those before this reset
            zero = step.observation["observation"][:, 0].tolist()
        for row, length in enumerate(LENGTHS):
            episode, position = divmod(time, length + 1)  # an episode is its reset row and `length` steps
            ended = position == length
            number, counted = step.observation["observation"][row].tolist()
            assert counted == position
            assert number - zero[row] == episode
            assert step.first[row].item() == (position == 0)
            assert step.reward[row].item() == position
            assert step.terminated[row].item() == (ended and ending == "termination")
            assert step.truncated[row].item() == (ended and ending == "truncation")
    episodes = manager.episodes()
    for row, length in enumerate(LENGTHS):
        own = [e for e in episodes if e.row == row]
        assert len(own) == 40 // (length + 1)
        assert {(e.reward, e.length) for e in own} == {(length * (length + 1) / 2, length)}
        assert [e.infos["step"] for e in own] == [length] * len(own)
    assert manager.episodes() == []
    manager.close()
    manager.close()


def test_step_object_is_reused():
    manager = simple("termination")
    step = manager.reset(0)
    again = manager.step(ACTION)
    assert again is step
    assert step.observation["observation"].data_ptr() == again.observation["observation"].data_ptr()
    assert (step.reward.dtype, step.first.dtype) == (torch.float32, torch.bool)


def test_simple_episodes_have_distinct_reproducible_seeds():
    def run(seed, branch=0):
        manager = SimpleEnvManager(lambda: CountingEnv(3), 2, "counting", branch=branch)
        manager.reset(seed)
        for _ in range(20):
            manager.step({"action": torch.zeros(2, dtype=torch.int64)})
        return [(e.row, e.seed) for e in manager.episodes()]

    assert run(1) == run(1)
    seeds = [seed for _, seed in (*run(1), *run(2), *run(1, branch=1))]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_other_autoreset_modes_raise(mode):
    env = SyncVectorEnv([CountingEnv], autoreset_mode=mode)
    with pytest.raises(UserError, match=mode.value):
        VectorEnvManager(env, "counting")


def test_unknown_autoreset_mode_raises():
    env = SyncVectorEnv([CountingEnv])
    env.metadata = {}
    with pytest.raises(UserError, match="None"):
        VectorEnvManager(env, "counting")


def test_vector_and_simple_agree_on_cartpole():
    """Same actions and same first seeds: the first episode of every row is the same, step for step."""
    sync = VectorEnvManager(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3), "sync")
    loop = SimpleEnvManager(lambda: gymnasium.make("CartPole-v1"), 3, "loop")
    loop._rows.seed_of = lambda row, episode: sync.derive_seed(0) + row  # SyncVectorEnv gives row i the seed + i
    a, b = sync.reset(5), loop.reset(5)
    generator = torch.Generator().manual_seed(0)
    alive = torch.ones(3, dtype=torch.bool)
    for _ in range(60):
        for name in ("reward", "terminated", "truncated", "first"):
            np.testing.assert_array_equal(getattr(a, name)[alive], getattr(b, name)[alive])
        np.testing.assert_array_equal(a.observation["observation"][alive], b.observation["observation"][alive])
        alive &= ~(a.terminated | a.truncated)
        action = {"action": torch.randint(0, 2, (3,), generator=generator)}
        a, b = sync.step(action), loop.step(action)
    assert not alive.any()
