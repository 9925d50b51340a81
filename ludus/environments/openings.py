"""A wrapper that begins episodes with random actions. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ludus.core.errors import UserError
from ludus.environments.multiagent import JointEnv


class RandomOpening(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes 0 to ``most`` random actions before an episode begins, of which agents get nothing.

    For self-play: players who have become good do not lead each other to most positions of a game any more, and would
    not learn, or would forget, what to do there. Choices that the info ``mask`` forbids are not taken. Rewards of the
    random actions do not count. If an episode ends before it has begun, another one is begun.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], *, most: int = 4, mask: str = "action_mask") -> None:
        super().__init__(env)
        if most < 0:
            raise UserError(f"RandomOpening has most={most}; give the most actions, 0 or more.")
        self._count, self._mask = spaces.Discrete(most + 1), mask

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._count.seed(seed)
            self.action_space.seed(seed)
        observation, info = self.env.reset(seed=seed, options=options)
        for _ in range(self._count.sample()):
            action = self.action_space.sample(_to_sample(info.get(self._mask), self.action_space))
            observation, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                return self.reset(options=options)
        if isinstance(self.unwrapped, JointEnv):
            self.unwrapped.restart_returns()
        return observation, info


def _to_sample(mask: Any, space: spaces.Space[Any]) -> Any:
    """Return a mask as ``space.sample`` wants it: int8, with None for each part of a Dict that has no mask."""
    if mask is None or isinstance(space, spaces.Box):
        return None
    if isinstance(space, spaces.Dict):
        parts = mask if isinstance(mask, Mapping) else dict.fromkeys(space.spaces, mask)  # of a single action
        return {key: _to_sample(parts.get(key), child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(_to_sample, mask, space.spaces))
    if isinstance(space, spaces.MultiDiscrete):
        each = np.split(mask, np.cumsum(space.nvec)[:-1]) if isinstance(mask, np.ndarray) else mask
        return tuple(np.asarray(part, np.bool_).astype(np.int8) for part in each)
    return np.asarray(mask, np.bool_).astype(np.int8)
