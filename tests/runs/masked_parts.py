"""An environment whose mask of one part of the action depends on the choice of another."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Doors(gymnasium.Env[Any, Any]):
    """Choose a room and one of its doors that is open; a closed door is an error, and a higher one is worth more."""

    def __init__(self, in_info: bool = True) -> None:
        self.in_info = in_info
        self.action_space = spaces.Dict({"door": spaces.Discrete(4), "room": spaces.Discrete(3)})
        seen: dict[str, spaces.Space[Any]] = {"x": spaces.Box(0, 1, (3,), np.float32)}
        mask = spaces.Dict({"door": spaces.Dict({"room": spaces.MultiBinary((3, 4))})})
        self.observation_space = spaces.Dict(seen if in_info else seen | {"action_mask": mask})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.draw()

    def draw(self) -> Any:
        self.open = self.np_random.random((3, 4)) < 0.3
        self.open[np.arange(3), self.np_random.integers(4, size=3)] = True
        mask = {"action_mask": {"door": {"room": self.open.astype(np.int8)}}}
        seen = {"x": self.np_random.random(3, np.float32)}
        return (seen, mask) if self.in_info else (seen | mask, {})

    def step(self, action: Any) -> Any:
        assert self.open[action["room"], action["door"]], "a closed door was chosen"
        self.count += 1
        observation, info = self.draw()
        return observation, float(action["door"]), self.count >= 5, False, info
