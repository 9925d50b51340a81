"""Recorded episodes that are made up."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.dataset import RecordedEpisode

Array = NDArray[Any]


def make_up(rng: np.random.Generator, lengths: list[int], stack: int = 0) -> tuple[RecordedEpisode, ...]:
    """Episodes in which every number is another; with ``stack``, also observations ``frames`` of so many frames."""
    episodes = []
    for number, length in enumerate(lengths):
        numbers = 100.0 * number + np.arange(length + 1)
        observation: dict[str, Array] = {"x": np.stack([numbers, -numbers], 1).astype(np.float32)}
        if stack:
            stream = np.concatenate([-1000 * number - np.arange(stack - 1), numbers]).astype(np.int32)
            observation["frames"] = np.stack([stream[i : i + stack] for i in range(length + 1)])
        action = {"a": (numbers[:-1] + 0.5).astype(np.float32)[:, None]}
        reward = rng.integers(-9, 10, length).astype(np.float32)
        ending = str(rng.choice(["terminated", "truncated", "neither"]))
        episodes.append(RecordedEpisode(observation, action, reward, ending == "terminated", ending == "truncated"))
    return tuple(episodes)
