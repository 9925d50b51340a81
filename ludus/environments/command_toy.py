"""A toy environment with a parameterized action, for tests and examples."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Observation = dict[str, Any]
Info = dict[str, Any]
WAIT, BUILD, SCOUT, ATTACK = range(4)
COLOURS = {ATTACK: 0, BUILD: 1, SCOUT: 2}  # channel of the cell that each function is for


class CommandEnv(gymnasium.Env[Observation, Any]):
    """Give a command at a place of a map: build on green, scout blue, or attack a unit on red; each is rewarded by 1.

    An action is a function, a place (row and column) and a target; waiting uses neither of the latter and attacking
    both. The screen has one cell of each colour; ``units`` is a padded list of [is the enemy, health], and the right
    target is the enemy. All are drawn at every step, and so is which function is allowed besides waiting. This is known
    from the mask alone, which networks do not get: the right place depends on the function that is sampled, so that
    places which are chosen independently of it are right in one of three steps, 2.7 of 8.
    """

    def __init__(self, size: int = 6, units: int = 5, length: int = 8) -> None:
        if size < 2 or units < 1:
            raise ValueError(f"size is {size} and units {units}, but there must be 3 cells and a unit")
        self.size, self.units, self.length = size, units, length
        self.observation_space = spaces.Dict(
            {
                "screen": spaces.Box(0, 255, (3, size, size), np.uint8),
                "units": spaces.Box(0, 1, (units, 2), np.float32),
                "units/mask": spaces.MultiBinary(units),
            }
        )
        self.action_space = spaces.Dict(
            {
                "function": spaces.Discrete(4),
                "place": spaces.MultiDiscrete([size, size]),
                "target": spaces.Discrete(units),
            }
        )
        self._places = np.zeros((3, 2), np.int64)  # of each colour
        self._allowed, self._enemy, self._step = BUILD, 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), self._info()

    def step(self, action: dict[str, Any]) -> tuple[Observation, float, bool, bool, Info]:
        self._step += 1
        function = int(action["function"])
        right = function == self._allowed and np.array_equal(action["place"], self._places[COLOURS[function]])
        if function == ATTACK:
            right = right and int(action["target"]) == self._enemy
        return self._draw(), float(right), self._step >= self.length, False, self._info()

    def _draw(self) -> Observation:
        """Draw the screen, the units and the allowed function, and return the observation."""
        cells = self.np_random.permutation(self.size**2)[:3]
        self._places = np.stack([cells // self.size, cells % self.size], 1)
        screen = np.zeros((3, self.size, self.size), np.uint8)
        screen[np.arange(3), self._places[:, 0], self._places[:, 1]] = 255
        count = int(self.np_random.integers(1, self.units + 1))
        self._enemy = int(self.np_random.integers(count))
        units = self.np_random.random((self.units, 2)).astype(np.float32)
        units[:, 0] = np.arange(self.units) >= count  # padding looks like an enemy
        units[self._enemy, 0] = 1
        self._allowed = int(self.np_random.integers(BUILD, ATTACK + 1))
        present = (np.arange(self.units) < count).astype(np.int8)
        return {"screen": screen, "units": units, "units/mask": present}

    def _info(self) -> Info:
        mask = np.zeros(4, np.int8)
        mask[[WAIT, self._allowed]] = 1
        return {"action_mask": {"function": mask}}


class OrderEnv(CommandEnv):
    """Choose the cell of the map that an order names by its colour; each right choice is rewarded by 1.

    An action is a place (row and column), and the order is a part of the observation. A policy that finds the coloured
    cells but ignores the order is right in one of three steps, 2.7 of 8.
    """

    def __init__(self, size: int = 6, length: int = 8) -> None:
        super().__init__(size, length=length)
        screen = spaces.Box(0, 255, (3, size, size), np.uint8)
        self.observation_space = spaces.Dict({"screen": screen, "order": spaces.Discrete(len(COLOURS))})
        self.action_space = spaces.MultiDiscrete([size, size])

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, Info]:
        return super().step({"function": self._allowed, "place": action, "target": self._enemy})

    def _draw(self) -> Observation:
        screen = super()._draw()["screen"]
        return {"screen": screen, "order": COLOURS[self._allowed]}

    def _info(self) -> Info:
        return {}
