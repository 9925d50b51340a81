"""Recorded episodes to learn from: demonstrations, and datasets of offline learning. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class RecordedEpisode(NamedTuple):
    """T steps of one environment, or the first T of an episode whose recording was stopped."""

    observation: Mapping[str, NDArray[Any]]  # [T+1, …] by name, as in the observation specs
    action: Mapping[str, NDArray[Any]]  # [T, …] by name, as the environment takes them
    reward: NDArray[Any]  # [T]
    terminated: bool  # of the last step; both False: the recording stopped within the episode
    truncated: bool

    @property
    def length(self) -> int:
        """The number of steps."""
        return len(self.reward)


@dataclass(frozen=True)
class Dataset:
    """Recorded episodes with the observations and actions of an environment."""

    episodes: tuple[RecordedEpisode, ...]
    name: str  # for messages

    @property
    def transitions(self) -> int:
        """The number of steps of all episodes."""
        return sum(episode.length for episode in self.episodes)

    @property
    def mean_return(self) -> float:
        """The mean of the episodes' undiscounted returns."""
        return float(np.mean([episode.reward.sum() for episode in self.episodes]))

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the contents, by which a resumed run recognizes its data."""
        digest = hashlib.sha256()
        for episode in self.episodes:
            digest.update(f"{episode.length} {episode.terminated} {episode.truncated}".encode())
            for arrays in (episode.observation, episode.action, {"reward": episode.reward}):
                for name in sorted(arrays):
                    digest.update(name.encode())
                    digest.update(np.ascontiguousarray(arrays[name]).data)
        return digest.hexdigest()
