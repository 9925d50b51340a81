"""Small environments with goals, for hindsight: without it, hardly any episode of theirs has a reward to learn from."""

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
    """Flip one of ``bits`` bits at each step until they are as wanted (Andrychowicz et al. 2017, section 3.1).

    A step costs 1 but the one that reaches the goal, which ends the episode; it is cut after ``bits`` steps. Start and
    goal are drawn anew for each episode and differ, in half of the bits on average. The best return is 1 − differing
    bits; a policy that never arrives gets −bits, as random ones do in all but a few of 2^bits episodes.
    """

    def __init__(self, bits: int = 10) -> None:
        if bits < 1:
            raise ValueError(f"bits is {bits}, but must be 1 or more")
        self.bits = bits
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict({name: spaces.MultiBinary(bits) for name in names})
        self.action_space = spaces.Discrete(bits)
        self._now, self._wanted = np.zeros(bits, np.int8), np.ones(bits, np.int8)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[dict[str, Bits], Info]:
        super().reset(seed=seed)
        self._step = 0
        self._now = self._wanted = self.np_random.integers(0, 2, self.bits, np.int8)
        while np.array_equal(self._now, self._wanted):
            self._wanted = self.np_random.integers(0, 2, self.bits, np.int8)
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Bits], float, bool, bool, Info]:
        self._step += 1
        self._now[action] ^= 1
        reward = float(self.compute_reward(self._now, self._wanted, {}))
        reached = bool(self.compute_terminated(self._now, self._wanted, {}))
        return self._observe(), reward, reached, not reached and self._step >= self.bits, {"reached": reached}

    def compute_reward(self, achieved_goal: Bits, desired_goal: Bits, info: Info) -> Floats:
        """0 where all bits are as wanted, else −1; of one goal or of many."""
        return np.asarray((achieved_goal == desired_goal).all(-1), np.float32) - 1

    def compute_terminated(self, achieved_goal: Bits, desired_goal: Bits, info: Info) -> Flags:
        """Whether all bits are as wanted; of one goal or of many."""
        return np.asarray((achieved_goal == desired_goal).all(-1))

    def _observe(self) -> dict[str, Bits]:
        return {"observation": self._now.copy(), "achieved_goal": self._now.copy(), "desired_goal": self._wanted.copy()}


class PointGoalEnv(gymnasium.Env[Any, Floats]):
    """Move a point on the square [−1, 1]² to where it is wanted; every step costs 1 unless it ends there.

    A step of at most ``stride`` in each direction; wanted is a place to within ``near``. Nothing ends an episode but
    its ``length``, so staying there is what pays.
    """

    def __init__(self, length: int = 16, stride: float = 0.25, near: float = 0.15) -> None:
        self.length, self.stride, self.near = length, stride, near
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict({name: spaces.Box(-1, 1, (2,), np.float32) for name in names})
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self._now = self._wanted = np.zeros(2, np.float32)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[dict[str, Floats], Info]:
        super().reset(seed=seed)
        self._step = 0
        self._now, self._wanted = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        return self._observe(), {}

    def step(self, action: Floats) -> tuple[dict[str, Floats], float, bool, bool, Info]:
        self._step += 1
        self._now = np.clip(self._now + self.stride * action, -1, 1).astype(np.float32)
        reward = float(self.compute_reward(self._now, self._wanted, {}))
        return self._observe(), reward, False, self._step >= self.length, {"reached": reward == 0}

    def compute_reward(self, achieved_goal: Floats, desired_goal: Floats, info: Info) -> Floats:
        """0 where the point is near its goal, else −1; of one goal or of many."""
        return np.asarray(np.linalg.norm(achieved_goal - desired_goal, axis=-1) <= self.near, np.float32) - 1

    def compute_terminated(self, achieved_goal: Floats, desired_goal: Floats, info: Info) -> Flags:
        """Never; of one goal or of many."""
        return np.zeros(achieved_goal.shape[:-1], np.bool_)

    def _observe(self) -> dict[str, Floats]:
        return {"observation": self._now.copy(), "achieved_goal": self._now.copy(), "desired_goal": self._wanted.copy()}
