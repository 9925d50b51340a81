"""Environments of torch tensors, for ``env.backend tensor``: all rows step at once, on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor


class TensorCue:
    """Shows a cue with the first observation of an episode and asks for it at the last step; right pays 1, wrong 0.

    Episodes are ``length`` steps long and end by termination, or by truncation with ``truncates``. The first
    observation is the only one that tells the cue, so whoever loses it is right half of the time.
    """

    def __init__(
        self, num_envs: int, length: int = 4, truncates: bool = False, gives_final: bool = True, device: str = "cpu"
    ) -> None:
        self.num_envs, self.length = num_envs, length
        self.truncates, self.gives_final = truncates, gives_final
        self.device = torch.device(device)
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._generator = torch.Generator(self.device)
        self._choices = torch.arange(2, device=self.device)
        self._cue = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._time = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    def reset(self, seed: int) -> Tensor:
        """Begin new episodes in all rows."""
        self._generator.manual_seed(seed)
        self._cue, self._time = self._draw(), torch.zeros_like(self._time)
        return self._observe()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Step all rows; those that end are reset at once, and their last observations are given apart."""
        self._time = self._time + 1
        ended = self._time == self.length
        reward = (ended & (action == self._cue)).to(torch.float32)
        final = self._observe() if self.gives_final else None
        self._cue = torch.where(ended, self._draw(), self._cue)
        self._time = self._time.masked_fill(ended, 0)
        no = torch.zeros_like(ended)
        endings = (no, ended) if self.truncates else (ended, no)
        return self._observe(), reward, *endings, final

    def state_dict(self) -> dict[str, Any]:
        """The cues, times and the generator."""
        return {"cue": self._cue, "time": self._time, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._cue, self._time = (state[name].to(self.device) for name in ("cue", "time"))
        self._generator.set_state(state["generator"])

    def _draw(self) -> Tensor:
        return torch.randint(2, (self.num_envs,), generator=self._generator, device=self.device)

    def _observe(self) -> Tensor:
        """One-hot cue at the first step, then the share of the episode that is over."""
        shown = (self._cue.unsqueeze(-1) == self._choices) & (self._time == 0).unsqueeze(-1)
        return torch.cat([shown, self._time.unsqueeze(-1) / self.length], -1).to(torch.float32)
