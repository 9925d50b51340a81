"""Toy environments with lists, graphs and clips as observations, for tests and examples."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Clip = NDArray[np.uint8]
Info = dict[str, Any]


class _QuestionEnv(gymnasium.Env[Any, np.int64]):
    """A new question at every step; right answers are rewarded by 1."""

    length: int  # of an episode
    _answer = 0
    _step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self._step = 0
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, Info]:
        self._step += 1
        reward = float(action == self._answer)
        return self._draw(), reward, self._step >= self.length, False, {}

    @abstractmethod
    def _draw(self) -> Any:
        """Draw a question, remember its answer, and return the observation."""


class MatchEnv(_QuestionEnv):
    """Find the entity with the same key as the question and answer with its value; a right answer is rewarded by 1.

    An observation is an unordered list of ``least`` to ``most`` entities. Each is [is the question, one-hot key,
    one-hot value]; keys are distinct, except that the question has the key of one of the others, and it has no value.
    All are drawn at every step. The answer depends on a relation between two entities at any two places in the list.
    """

    def __init__(self, least: int = 4, most: int = 8, keys: int = 8, values: int = 4, length: int = 8) -> None:
        if not 2 <= least <= most <= keys + 1:
            raise ValueError(
                f"least is {least} and most {most}, but 2 ≤ least ≤ most ≤ keys + 1 = {keys + 1} is needed"
            )
        self.least, self.most, self.keys, self.values, self.length = least, most, keys, values, length
        self.observation_space = spaces.Sequence(spaces.Box(0, 1, (1 + keys + values,), np.float32), stack=True)
        self.action_space = spaces.Discrete(values)

    def _draw(self) -> Floats:
        """Draw entities in a random order and return them."""
        count = int(self.np_random.integers(self.least - 1, self.most))  # without the question
        keys = self.np_random.permutation(self.keys)[:count]
        values = self.np_random.integers(self.values, size=count)
        self._answer = int(values[0])
        entities = np.zeros((count + 1, 1 + self.keys + self.values), np.float32)
        entities[np.arange(count), 1 + keys] = 1
        entities[np.arange(count), 1 + self.keys + values] = 1
        entities[count, [0, 1 + keys[0]]] = 1
        shuffled: Floats = self.np_random.permutation(entities)
        return shuffled


class NeighbourEnv(_QuestionEnv):
    """Answer with the colour of the node that the edge from the marked node leads to; right answers are rewarded by 1.

    A node is [is marked, one-hot colour]; an edge has a random weight, which does not matter. There are 2 to ``most``
    nodes, and one edge leaves each node. All are drawn at every step.
    """

    def __init__(self, most: int = 6, colours: int = 3, length: int = 8) -> None:
        self.most, self.colours, self.length = most, colours, length
        nodes, edges = spaces.Box(0, 1, (1 + colours,), np.float32), spaces.Box(0, 1, (1,), np.float32)
        self.observation_space = spaces.Graph(nodes, edges)
        self.action_space = spaces.Discrete(colours)

    def _draw(self) -> spaces.GraphInstance:
        count = int(self.np_random.integers(2, self.most + 1))
        colours = self.np_random.integers(self.colours, size=count)
        starts = self.np_random.permutation(count)
        ends = (starts + self.np_random.integers(1, count, size=count)) % count  # not the node itself
        marked = int(self.np_random.integers(count))
        self._answer = int(colours[ends[starts == marked][0]])
        nodes = np.zeros((count, 1 + self.colours), np.float32)
        nodes[np.arange(count), 1 + colours] = 1
        nodes[marked, 0] = 1
        edges = self.np_random.random((count, 1), np.float32)
        return spaces.GraphInstance(nodes, edges, np.stack([starts, ends], 1).astype(np.int32))


class MotionEnv(_QuestionEnv):
    """Answer in which of four directions a bright square moves; a right answer is rewarded by 1.

    An observation is a movie ``[frames, size, size, 1]`` in which the square starts anywhere and leaves on one side to
    come back on the other, so a single frame tells nothing. A new movie is drawn at every step.
    """

    DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))  # rows, columns per frame

    def __init__(self, frames: int = 4, size: int = 10, length: int = 8) -> None:
        self.frames, self.size, self.length = frames, size, length
        self.observation_space = spaces.Box(0, 255, (frames, size, size, 1), np.uint8)
        self.action_space = spaces.Discrete(len(self.DIRECTIONS))

    def _draw(self) -> Clip:
        self._answer = int(self.np_random.integers(len(self.DIRECTIONS)))
        movie = np.zeros((self.frames, self.size, self.size, 1), np.uint8)
        movie[0, :2, :2] = 255
        movie[0] = np.roll(movie[0], self.np_random.integers(self.size, size=2), (0, 1))
        for frame in range(1, self.frames):
            movie[frame] = np.roll(movie[frame - 1], self.DIRECTIONS[self._answer], (0, 1))
        return movie
