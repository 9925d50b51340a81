"""Toy environments with image observations, for tests and examples."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Image = NDArray[np.uint8]
Info = dict[str, Any]


class CatchEnv(gymnasium.Env[Image, np.int64]):
    """Catch a falling ball with a paddle; both move two pixels per step.

    When a ball reaches the bottom, the reward is 1 if it touches the paddle, else −1; the episode ends after ``balls``
    balls. The ball is red, the paddle green. Smaller balls and paddles make it harder.
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


class QuestionEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """A nested Dict observation of an image and a question about it; the right answer is rewarded by 1.

    The image has a bright patch. The question vector asks for its vertical or horizontal half. Both are drawn at every
    step. A random policy is right in half of the steps, one that ignores the question in three quarters.
    """

    def __init__(self, size: int = 12, length: int = 16) -> None:
        self.size, self.length = size, length
        image, question = spaces.Box(0, 255, (size, size, 1), np.uint8), spaces.Box(0, 1, (2,), np.float32)
        self.observation_space = spaces.Dict({"inner": spaces.Dict({"image": image, "question": question})})
        self.action_space = spaces.Discrete(2)
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
        """Draw the position of the patch and the question, and return both as observation."""
        half = self.size // 2
        where = self.np_random.integers(2, size=2)  # lower? right?
        row, column = (int(x) for x in where * half + self.np_random.integers(half - 1, size=2))
        image = np.zeros((self.size, self.size, 1), np.uint8)
        image[row : row + 2, column : column + 2] = 255
        question = int(self.np_random.integers(2))
        self._answer = int(where[question])
        return {"inner": {"image": image, "question": np.eye(2, dtype=np.float32)[question]}}


class MemoryImageEnv(gymnasium.Env[Image, np.int64]):
    """The first image has a bright corner, which is the right action of the last step; MemoryEnv as images.

    The corners are numbered row by row. All later images are dark, and the last one grey. The right action is rewarded
    by 1, any other by −1/3, so a policy without memory has an expected return of 0.
    """

    def __init__(self, size: int = 6, length: int = 5) -> None:
        self.size, self.length = size, length
        self.observation_space = spaces.Box(0, 255, (size, size, 1), np.uint8)
        self.action_space = spaces.Discrete(4)
        self._corner, self._step = 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Image, Info]:
        super().reset(seed=seed)
        self._corner, self._step = int(self.np_random.integers(4)), 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Image, float, bool, bool, Info]:
        self._step += 1
        if self._step < self.length:
            return self._observe(), 0.0, False, False, {}
        right = int(action) == self._corner
        return self._observe(), 1.0 if right else -1 / 3, True, False, {"recalled": right}

    def _observe(self) -> Image:
        image = np.zeros((self.size, self.size, 1), np.uint8)
        if self._step == 0:
            row, column = divmod(self._corner, 2)
            image[row * (self.size - 2) :][:2, column * (self.size - 2) :][:, :2] = 255
        elif self._step == self.length - 1:
            image[:] = 128
        return image
