"""Recorded episodes for tests: of real environments and any policy, and made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from ludus.core.dataset import RecordedEpisode

Array = NDArray[Any]


def record(
    environment: gymnasium.Env[Any, Any], act: Callable[[Any], Any], episodes: int, seed: int = 0
) -> list[RecordedEpisode]:
    """Play episodes by ``act(observation)``; observations and actions are plain or flat Dicts."""
    return [_play(environment, act, seed + number) for number in range(episodes)]


def _play(environment: gymnasium.Env[Any, Any], act: Callable[[Any], Any], seed: int) -> RecordedEpisode:
    observation, _ = environment.reset(seed=seed)
    seen, done, rewards, ends = [observation], [], [], (False, False)
    while not any(ends):
        action = act(observation)
        observation, reward, *ends_now, _ = environment.step(action)
        ends = bool(ends_now[0]), bool(ends_now[1])
        seen.append(observation)
        done.append(action)
        rewards.append(reward)
    return RecordedEpisode(_stack(seen, "observation"), _stack(done, "action"), np.asarray(rewards, np.float32), *ends)


def _stack(values: list[Any], name: str) -> dict[str, Array]:
    if isinstance(values[0], Mapping):
        return {key: np.stack([np.asarray(value[key]) for value in values]) for key in values[0]}
    return {name: np.stack([np.asarray(value) for value in values])}


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
