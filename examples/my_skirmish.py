"""A custom environment with a map, a list of units and an order, whose actions are a place of the map and a unit.

In this folder:

ludus show network my_skirmish:Skirmish --env.max-length 6 --agent.heads place=spatial 'target=pointer(units)'
ludus train my_skirmish:Skirmish --env.max-length 6 --agent.heads place=spatial 'target=pointer(units)'
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SIDE, MOST = 8, 6  # of the map; units
GRASS, ROCK, GOLD = range(3)


class Skirmish(gymnasium.Env[dict[str, Any], dict[str, Any]]):
    """Obey the order: dig at the only gold of the map, or attack the weakest unit; each success is rewarded by 1."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.observation_space = spaces.Dict(
            {
                "land": spaces.MultiDiscrete(np.full((SIDE, SIDE), 3)),
                "units": spaces.Sequence(spaces.Box(0, 1, (2,), np.float32), stack=True),  # strength, speed
                "order": spaces.Discrete(2),
            }
        )
        self.action_space = spaces.Dict({"place": spaces.MultiDiscrete([SIDE, SIDE]), "target": spaces.Discrete(MOST)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._draw(), {}

    def _draw(self) -> dict[str, Any]:
        self.land = self.np_random.integers(0, 2, (SIDE, SIDE))
        self.gold = self.np_random.integers(0, SIDE, 2)
        self.land[tuple(self.gold)] = GOLD
        self.units = self.np_random.random((self.np_random.integers(1, MOST + 1), 2), np.float32)
        self.order = int(self.np_random.integers(2))
        return {"land": self.land, "units": self.units, "order": self.order}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        dug = np.array_equal(action["place"], self.gold)
        attacked = int(action["target"]) == int(self.units[:, 0].argmin())
        self.steps += 1
        return self._draw(), float(attacked if self.order else dug), False, self.steps == self.length, {}
