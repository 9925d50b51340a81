"""A wrapper that begins episodes with random actions. Needs no torch."""

from __future__ import annotations

from typing import Any

import gymnasium

from ludus.core.errors import UserError


class RandomOpening(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes 0 to ``most`` random actions before an episode begins, of which agents get nothing.

    For self-play: players who have become good do not lead each other to most positions of a game any more, and would
    not learn, or would forget, what to do there. Choices that the info ``mask`` forbids are not taken. If an episode
    ends before it has begun, another one is begun.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], *, most: int = 4, mask: str = "action_mask") -> None:
        super().__init__(env)
        if most < 0:
            raise UserError(f"RandomOpening has most={most}; give the most actions, 0 or more.")
        self._count, self._mask = gymnasium.spaces.Discrete(most + 1), mask

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._count.seed(seed)
            self.action_space.seed(seed)
        observation, info = self.env.reset(seed=seed, options=options)
        for _ in range(self._count.sample()):
            action = self.action_space.sample(info.get(self._mask))
            observation, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                return self.reset(options=options)
        return observation, info
