"""Reward scaling: the statistics include a rollout before it is learned from."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from agents_setup import make_worker
from gymnasium import spaces

from ludus.containers.loop import begin, collect, improve


class Paying(gymnasium.Env):
    """Pays about 1,000 at every step after the first ``free`` ones; episodes do not end."""

    def __init__(self, free=0):
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
        self.free, self.count = free, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        reward = 0.0 if self.count <= self.free else 1000 + self.np_random.normal()
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), reward, False, False, {}


PAYING = f"{__name__}:Paying"


def make(agent, **changes):
    once = {"agent__replay_ratio": 0.0} if "acer" in agent else {}
    return make_worker(PAYING, agent, agent__rollout=16, agent__normalize_reward=True, **once, **changes)


def discounted(reward, gamma):
    """The running return at each step ``[T, B]``, in float64."""
    carried, returns = np.zeros(reward.shape[1]), []
    for r in reward.double().numpy():
        carried = r + gamma * carried
        returns.append(carried)
    return np.stack(returns)


@pytest.mark.parametrize("agent", ["ppo", "a2c", "acer", "acer_vtrace"])
def test_a_rollout_is_scaled_by_statistics_that_include_it(agent):
    worker = make(agent)
    begin(worker, 0)
    seen = []
    for _ in range(3):
        collect(worker)
        batch = worker.cache.read()
        seen.append(batch.reward.clone())
        prepared = worker.agent.prepare(batch)
        reward = torch.cat(seen)
        std = discounted(reward, worker.settings.agent.gamma).std()
        scaler = worker.agent.reward_scaler
        np.testing.assert_allclose(float(scaler.statistics.scale), 1 / std, rtol=1e-5)
        assert float(scaler.statistics.count) == reward.numel()  # each step once
        if "acer" in agent:
            torch.testing.assert_close(prepared.reward, seen[-1] / float(std), rtol=1e-5, atol=0)
            worker.agent.prepare(replace(batch, index=torch.zeros(4)))
            assert float(scaler.statistics.count) == reward.numel()  # replayed rollouts do not count again
        worker.agent.update_statistics(batch)
        assert float(scaler.statistics.count) == reward.numel()
    worker.close()


@pytest.mark.parametrize("agent", ["ppo", "a2c", "acer", "acer_vtrace"])
@pytest.mark.parametrize("free", [0, 40])
def test_large_rewards_never_reach_the_loss_unscaled(agent, free):
    """Neither in the first rollout, nor in the first one that holds a reward."""
    worker = make(agent, env__options=(f"free={free}",))
    begin(worker, 0)
    losses = []
    for _ in range(4):
        collect(worker)
        metrics, _ = improve(worker)
        losses.append(float(metrics["loss/value"]))
    assert max(losses) < 500  # half the square of a return of about 30 at most; unscale_value it is about 1e7
    worker.close()
