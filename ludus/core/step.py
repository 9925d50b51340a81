"""One step of B environments, and the agent's answer to it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors


class EnvStep(NamedTuple):
    """What B environments say. Reward and endings are those of the transition that led to ``observation``.

    A manager may write its next step into the same memory: whoever keeps a step copies it.
    """

    observation: Tensors  # [B, …]
    reward: Tensor  # [B] float32
    terminated: Tensor  # [B] bool
    truncated: Tensor  # [B] bool
    first: Tensor  # [B] bool: this observation begins an episode; reward and endings of such a row mean nothing

    def rows(self, rows: slice) -> EnvStep:
        """Some of the environments."""
        return EnvStep({name: x[rows] for name, x in self.observation.items()}, *(x[rows] for x in self[1:]))

    def to(self, device: torch.device) -> EnvStep:
        """The same on the device where the agent is."""
        if device.type == "cpu":
            return self
        observation = {name: x.to(device, non_blocking=True) for name, x in self.observation.items()}
        return EnvStep(observation, *(x.to(device, non_blocking=True) for x in self[1:]))


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
