"""One step of B environments, of the agent, and the record of a finished episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors


class EnvStep(NamedTuple):
    """One step of B environments. Reward and endings belong to the transition that led to ``observation``.

    Managers may reuse the memory for the next step; copy what must outlive it.
    """

    observation: Tensors  # [B, …]
    reward: Tensor  # [B] float32
    terminated: Tensor  # [B] bool
    truncated: Tensor  # [B] bool
    first: Tensor  # [B] bool: this observation is the first of an episode
    # [B] bool: the transition that led here happened; False is padding across an episode boundary. With next-step
    # autoreset real is ~first; with same-step autoreset both are true where an episode ended
    real: Tensor
    final: Tensors | None = None  # [B, …] same-step resets: the last observations of episodes that ended, if known

    def rows(self, rows: slice | Tensor) -> EnvStep:
        """Select environments."""
        return self._map(lambda x: x[rows])

    def to(self, device: torch.device) -> EnvStep:
        """Return the step on ``device``."""
        return self if self.reward.device == device else self._map(lambda x: x.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> EnvStep:
        observation = {name: function(x) for name, x in self.observation.items()}
        final = None if self.final is None else {name: function(x) for name, x in self.final.items()}
        flat = map(function, (self.reward, self.terminated, self.truncated, self.first, self.real))
        reward, terminated, truncated, first, real = flat
        return EnvStep(observation, reward, terminated, truncated, first, real, final)


class AgentStep(NamedTuple):
    """The agent's actions on one step of B environments."""

    action: Tensors  # [B, …] in policy space: before clipping or tanh
    experience: Tensors  # [B, …] stored for learning: log_prob, value, …
    state: HiddenState  # [B, …] after this step


class Episode(NamedTuple):
    """A finished episode."""

    row: int
    reward: float  # undiscounted sum
    length: int
    seed: int | None  # None if unknown
    infos: dict[str, float]  # the numeric infos of its last step
