"""A custom environment: any class with Gymnasium's methods.

In this folder:

ludus check my_environment:Docking
ludus train my_environment:Docking --nb-step 50_000
ludus play latest
ludus resume latest --nb-step 100_000
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

Observation = NDArray[np.float32]


class Docking(gymnasium.Env[Observation, np.int64]):
    """Dock a craft on a rail: reach position 0 slowly, and do not drift beyond position 1."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)  # position, velocity
    action_space = gymnasium.spaces.Discrete(3)  # thrust left, none, right
    time_limit = 200

    def __init__(self, thrust: float = 0.01, render_mode: str | None = None) -> None:
        self.thrust, self.render_mode = thrust, render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)  # seeds self.np_random
        self.position, self.velocity, self.steps = self.np_random.uniform(0.3, 0.9), 0.0, 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.velocity += self.thrust * (int(action) - 1)
        self.position += self.velocity
        self.steps += 1
        arrived, lost = self.position <= 0, self.position > 1
        docked = arrived and abs(self.velocity) < 0.03
        reward = -0.01 + (1.0 if docked else -1.0 if arrived or lost else 0.0)
        truncated = self.steps >= self.time_limit  # a time limit truncates, so the agent bootstraps
        return self._observe(), reward, arrived or lost, truncated, {"docked": float(docked)}

    def snapshot(self) -> dict[str, float]:  # optional, with restore: makes resuming faster
        return {"position": self.position, "velocity": self.velocity, "steps": self.steps}

    def restore(self, snapshot: dict[str, float]) -> None:
        vars(self).update(snapshot)

    def render(self) -> NDArray[np.uint8]:
        image = np.full((80, 400, 3), 20, np.uint8)
        image[20:60, :6] = 90, 200, 120
        left = int(np.clip(self.position, 0, 1) * 380)
        image[30:50, left : left + 20] = 240, 180, 60
        return image

    def _observe(self) -> Observation:
        return np.array([self.position, self.velocity * 10], np.float32)
