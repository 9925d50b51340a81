"""A wrapper that adds numbers about the whole episode to its last info, from where they are logged."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.core import ActType, ObsType


class TrajectoryInfo(gymnasium.Wrapper[ObsType, ActType, ObsType, ActType]):
    """Adds ``discounted_return``, ``nonzero_rewards`` and ``sum/<name>`` of infos to the last info of an episode.

    ``sums`` are the names of infos to add up over the episode; steps without one count as 0.
    """

    def __init__(
        self, env: gymnasium.Env[ObsType, ActType], discount: float = 0.99, sums: tuple[str, ...] = ()
    ) -> None:
        super().__init__(env)
        self.discount, self.sums = discount, sums
        self._clear()

    def _clear(self) -> None:
        self._return, self._weight, self._nonzero = 0.0, 1.0, 0
        self._totals = dict.fromkeys(self.sums, 0.0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsType, dict[str, Any]]:
        self._clear()
        return super().reset(seed=seed, options=options)

    def step(self, action: ActType) -> tuple[ObsType, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self._return += self._weight * float(reward)
        self._weight *= self.discount
        self._nonzero += float(reward) != 0
        for name in self.sums:
            self._totals[name] += float(info.get(name, 0.0))
        if terminated or truncated:
            found = {"discounted_return": self._return, "nonzero_rewards": self._nonzero}
            info = {**info, **found, **{f"sum/{name}": total for name, total in self._totals.items()}}
        return observation, reward, terminated, truncated, info
