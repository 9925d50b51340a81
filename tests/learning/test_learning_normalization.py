"""Running normalization of replay agents: observations of a scale of 1,000, and small rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import ludus

SETTINGS: dict[str, Any] = {
    "agent.warmup": 200,
    "agent.batch_size": 64,
    "agent.learning_rate": 1e-3,
    "network.hidden": (64, 64),
    "env.num": 1,
    "evaluation.every": 0,
    "compile": "off",
    "quiet": True,
}


class LargeNumbers(gymnasium.Env[Any, Any]):
    """Push a point to 0 in 20 steps; without pushing, the return is -10 on average. Observations are in thousands."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def _observe(self) -> Any:
        return np.array([1000 * self.x, 1000 * self.speed, 3000 + 1000 * (self.x - self.speed)], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x, self.speed, self.time = self.np_random.uniform(-1, 1), 0.0, 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.speed = 0.5 * self.speed + 0.2 * float(action[0])
        self.x += self.speed
        self.time += 1
        return self._observe(), -abs(self.x), False, self.time >= 20, {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("agent", ["sac", "td3"])
def test_normalization_makes_large_observations_learnable(agent: str, seed: int, tmp_path: Path) -> None:
    returns = {}
    for normalized in (False, True):
        settings = SETTINGS | {"agent.normalize_observation": normalized, "runs": str(tmp_path)}
        done = ludus.train(LargeNumbers, agent, nb_step=1_500, seed=seed, settings=settings)
        policy = ludus.load(done.run, environment=LargeNumbers)
        returns[normalized] = float(np.mean(policy.evaluate(20).returns))
        policy.close()
    assert returns[True] > -2.5
    assert returns[False] < -8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_reward_scale_makes_small_rewards_learnable(seed: int, tmp_path: Path) -> None:
    returns = {}
    for normalized in (False, True):
        settings = SETTINGS | {"agent.normalize_observation": True, "agent.normalize_reward": normalized}
        settings |= {"preprocess.reward": ("scale(by=0.001)",), "runs": str(tmp_path)}
        done = ludus.train(LargeNumbers, "sac", nb_step=1_500, seed=seed, settings=settings)
        policy = ludus.load(done.run, environment=LargeNumbers)
        returns[normalized] = float(np.mean(policy.evaluate(20).returns))
        policy.close()
    assert returns[True] > -4
    assert returns[False] < -8
