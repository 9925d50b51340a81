"""Small environments with images, for tests and as examples of a user's own."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Image = NDArray[np.uint8]
Info = dict[str, Any]


class CatchEnv(gymnasium.Env[Image, np.int64]):
    """A ball falls two pixels a step, and a paddle that moves two pixels left or right must catch it.

    A ball that reaches the bottom pays 1 if it touches the paddle, else −1; the episode ends after ``balls`` balls. The
    ball is red, the paddle green. Smaller balls and paddles are harder: less often caught by chance.
    """

    SPEED = 2

    def __init__(self, size: int = 36, balls: int = 5, ball: int = 4, paddle: int = 8) -> None:
        self.size, self.balls, self.ball, self.paddle = size, balls, ball, paddle
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.Discrete(3)
        self._left, self._x, self._column, self._row = balls, 0, 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Image, Info]:
        super().reset(seed=seed)
        self._left, self._x = self.balls, (self.size - self.paddle) // 2
        self._drop()
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Image, float, bool, bool, Info]:
        self._x = min(max(self._x + self.SPEED * (int(action) - 1), 0), self.size - self.paddle)
        self._row += self.SPEED
        reward = 0.0
        if self._row >= self.size - self.ball:
            caught = self._x - self.ball < self._column < self._x + self.paddle
            reward = 1.0 if caught else -1.0
            self._left -= 1
            if self._left:
                self._drop()
        return self._observe(), reward, self._left == 0, False, {}

    def _drop(self) -> None:
        self._column, self._row = int(self.np_random.integers(self.size - self.ball + 1)), 0

    def _observe(self) -> Image:
        image = np.zeros((self.size, self.size, 3), np.uint8)
        image[self._row : self._row + self.ball, self._column : self._column + self.ball, 0] = 255
        image[-2:, self._x : self._x + self.paddle, 1] = 255
        return image


class PointingEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """A nested Dict of an image and a vector that only together tell the right answer, which pays 1.

    A patch of the image is bright in one of four quarters, and the vector turns it on by 0 to 3 quarters: the answer is
    their sum modulo 4, drawn anew at every step. A guess is right once in four times.
    """

    def __init__(self, size: int = 12, length: int = 16) -> None:
        self.size, self.length = size, length
        image, vector = spaces.Box(0, 255, (size, size, 1), np.uint8), spaces.Box(0, 1, (4,), np.float32)
        self.observation_space = spaces.Dict({"inner": spaces.Dict({"image": image, "vector": vector})})
        self.action_space = spaces.Discrete(4)
        self._answer, self._step = 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[dict[str, Any], Info]:
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, Info]:
        self._step += 1
        reward = float(action == self._answer)
        return self._draw(), reward, self._step >= self.length, False, {}

    def _draw(self) -> dict[str, Any]:
        """Choose quarter, turn and the place of the patch in its quarter, and show them."""
        quarter, turn = (int(x) for x in self.np_random.integers(4, size=2))
        half = self.size // 2
        row, column = (int(x) for x in self.np_random.integers(half - 1, size=2))
        row, column = row + half * (quarter // 2), column + half * (quarter % 2)
        image = np.zeros((self.size, self.size, 1), np.uint8)
        image[row : row + 2, column : column + 2] = 255
        self._answer = (quarter + turn) % 4
        return {"inner": {"image": image, "vector": np.eye(4, dtype=np.float32)[turn]}}
