"""Environments that fail in workers of a cluster."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np


class Sick(gymnasium.Env[Any, Any]):
    """Raises an error, hangs or waits at its fifth step if a file says so."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, orders: str = "") -> None:
        self.orders = Path(orders)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 5 and self.orders.is_file():
            order = self.orders.read_text()
            os.unlink(self.orders)
            if order == "raise":
                raise ValueError("the wheel fell off")
            if order == "hang":
                time.sleep(1e6)
        return np.zeros(2, np.float32), 1.0, self.steps % 10 == 0, False, {}
