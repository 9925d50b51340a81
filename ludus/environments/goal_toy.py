"""Toy goal environments with sparse rewards, for hindsight replay."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bits = NDArray[np.int8]
Flags = NDArray[np.bool_]
Info = dict[str, Any]


class BitFlipEnv(gymnasium.Env[Any, np.int64]):
    """Flip one of ``bits`` bits per step until they equal the goal (Andrychowicz et al. 2017, section 3.1).

    The reward is −1, or 0 for the step that reaches the goal and terminates the episode, which is truncated after
    ``bits`` steps. Start and goal are random and differ in half of the bits on average. The best return is
    1 − differing bits; a random policy almost always gets −bits.
    """

    def __init__(self, bits: int = 10) -> None:
        if bits < 1:
            raise ValueError(f"bits is {bits}, but must be 1 or more")
        self.bits = bits
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict({name: spaces.MultiBinary(bits) for name in names})
        self.action_space = spaces.Discrete(bits)
        self._current, self._goal = np.zeros(bits, np.int8), np.ones(bits, np.int8)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[dict[str, Bits], Info]:
        super().reset(seed=seed)
        self._step = 0
        self._current = self._goal = self.np_random.integers(0, 2, self.bits, np.int8)
        while np.array_equal(self._current, self._goal):
            self._goal = self.np_random.integers(0, 2, self.bits, np.int8)
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Bits], float, bool, bool, Info]:
        self._step += 1
        self._current[action] ^= 1
        reward = float(self.compute_reward(self._current, self._goal, {}))
        reached = bool(self.compute_terminated(self._current, self._goal, {}))
        return self._observe(), reward, reached, not reached and self._step >= self.bits, {"reached": reached}

    def compute_reward(self, achieved_goal: Bits, desired_goal: Bits, info: Info) -> Floats:
        """Return 0 where all bits equal the goal, else −1; for one goal or a batch."""
        return np.asarray((achieved_goal == desired_goal).all(-1), np.float32) - 1

    def compute_terminated(self, achieved_goal: Bits, desired_goal: Bits, info: Info) -> Flags:
        """Return whether all bits equal the goal; for one goal or a batch."""
        return np.asarray((achieved_goal == desired_goal).all(-1))

    def _observe(self) -> dict[str, Bits]:
        return {
            "observation": self._current.copy(),
            "achieved_goal": self._current.copy(),
            "desired_goal": self._goal.copy(),
        }


class PointGoalEnv(gymnasium.Env[Any, Floats]):
    """Move a point in the square [−1, 1]² to its goal and stay there; the reward is 0 at the goal, else −1.

    A step is at most ``stride`` in each direction; the goal is reached within a distance of ``near``. Episodes are
    truncated after ``length`` steps and never terminate.
    """

    def __init__(self, length: int = 16, stride: float = 0.25, near: float = 0.15) -> None:
        self.length, self.stride, self.near = length, stride, near
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict({name: spaces.Box(-1, 1, (2,), np.float32) for name in names})
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self._current = self._goal = np.zeros(2, np.float32)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[dict[str, Floats], Info]:
        super().reset(seed=seed)
        self._step = 0
        self._current, self._goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        return self._observe(), {}

    def step(self, action: Floats) -> tuple[dict[str, Floats], float, bool, bool, Info]:
        self._step += 1
        self._current = np.clip(self._current + self.stride * action, -1, 1).astype(np.float32)
        reward = float(self.compute_reward(self._current, self._goal, {}))
        return self._observe(), reward, False, self._step >= self.length, {"reached": reward == 0}

    def compute_reward(self, achieved_goal: Floats, desired_goal: Floats, info: Info) -> Floats:
        """Return 0 where the point is near its goal, else −1; for one goal or a batch."""
        return np.asarray(np.linalg.norm(achieved_goal - desired_goal, axis=-1) <= self.near, np.float32) - 1

    def compute_terminated(self, achieved_goal: Floats, desired_goal: Floats, info: Info) -> Flags:
        """Return False; for one goal or a batch."""
        return np.zeros(achieved_goal.shape[:-1], np.bool_)

    def _observe(self) -> dict[str, Floats]:
        return {
            "observation": self._current.copy(),
            "achieved_goal": self._current.copy(),
            "desired_goal": self._goal.copy(),
        }
