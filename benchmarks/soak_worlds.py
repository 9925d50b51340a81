"""An environment that fails at random; needs no torch."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

EXIT = 3  # the code with which it leaves


class Flaky(CartPoleEnv):
    """CartPole that raises or exits with a small probability in each step."""

    def __init__(self, fails: float = 1e-4, seed: int = 0, limit: int = 500) -> None:
        super().__init__()
        self._fails, self._limit, self._length = fails, limit, 0
        self._luck = np.random.default_rng([seed, os.getpid()])  # a new process: other luck

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        self._length = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Fail or step."""
        if self._luck.random() < self._fails:
            print("a part of the world breaks", file=sys.stderr, flush=True)
            if self._luck.random() < 0.5:
                os._exit(EXIT)
            raise ValueError("a part of the world is broken")
        observation, reward, terminated, _, info = super().step(action)
        self._length += 1
        return observation, float(reward), terminated, self._length >= self._limit, info
