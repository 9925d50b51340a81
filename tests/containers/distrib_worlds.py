"""Environments that fail in one rank alone."""

from __future__ import annotations

import os
import time
from typing import Any

from gymnasium.envs.classic_control import CartPoleEnv


class FailsElsewhere(CartPoleEnv):
    """CartPole that raises at its 20th step in any other process than ``home``."""

    def __init__(self, home: int) -> None:
        super().__init__()
        self.home, self.count = home, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.count == 20 and os.getpid() != self.home:
            raise ValueError("the wheel fell off")
        return super().step(action)


class HangsElsewhere(FailsElsewhere):
    """CartPole that does not return from there."""

    def step(self, action: Any) -> Any:
        try:
            return super().step(action)
        except ValueError:
            time.sleep(1000)
