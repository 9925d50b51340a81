"""One step of B environments, and the agent's answer to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors


class EnvStep(NamedTuple):
    """One step of B environments. Reward and endings are those of the transition that led to ``observation``.

    A manager may write its next step into the same memory: whoever keeps a step copies it.
    """

    observation: Tensors  # [B, …]
    reward: Tensor  # [B] float32
    terminated: Tensor  # [B] bool
    truncated: Tensor  # [B] bool
    first: Tensor  # [B] bool: this observation begins an episode
    # [B] bool: the transition that led here happened, so its reward and endings count. A manager that resets a row at
    # the step after its ending has real = ~first; one that resets in the same step has rows where both are true.
    real: Tensor
    final: Tensors | None = None  # [B, …] same-step resets: the last observations of rows that ended, if known

    def rows(self, rows: slice) -> EnvStep:
        """Return some of the environments."""
        return self._map(lambda x: x[rows])

    def to(self, device: torch.device) -> EnvStep:
        """Return the same step on the device where the agent is."""
        if self.reward.is_cpu if device.type == "cpu" else self.reward.device == device:
            return self
        return self._map(lambda x: x.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> EnvStep:
        observation = {name: function(x) for name, x in self.observation.items()}
        final = None if self.final is None else {name: function(x) for name, x in self.final.items()}
        flat = map(function, (self.reward, self.terminated, self.truncated, self.first, self.real))
        reward, terminated, truncated, first, real = flat
        return EnvStep(observation, reward, terminated, truncated, first, real, final)


class AgentStep(NamedTuple):
    """What an agent says to B environments."""

    action: Tensors  # [B, …] in policy space: before the clip, or u before tanh
    experience: Tensors  # [B, …] what the learner wants back: log_prob, value, …
    state: HiddenState  # [B, …] after this step


class Episode(NamedTuple):
    """An episode that ended."""

    row: int
    reward: float  # undiscounted sum
    length: int
    seed: int | None  # what the episode was reset with, where the manager knows
    infos: dict[str, float]  # the numeric infos of its last step
