"""A toy environment of torch tensors on any device, for ``env.backend tensor``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor


class TensorCue:
    """The first observation shows a cue, which is the right action of the last step, rewarded by 1.

    Episodes have ``length`` steps and terminate, or are truncated with ``truncates``. A policy without memory is right
    half of the time. All rows step at once and are reset in the same step.
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
        """Reset all rows."""
        self._generator.manual_seed(seed)
        self._cue, self._time = self._draw(), torch.zeros_like(self._time)
        return self._observe()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Step all rows and reset those that end; their last observations are returned as well."""
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
        """Return cues, times and the state of the generator."""
        return {"cue": self._cue, "time": self._time, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._cue, self._time = (state[name].to(self.device) for name in ("cue", "time"))
        self._generator.set_state(state["generator"])

    def _draw(self) -> Tensor:
        return torch.randint(2, (self.num_envs,), generator=self._generator, device=self.device)

    def _observe(self) -> Tensor:
        """Return the one-hot cue (first step only) and the elapsed share of the episode."""
        shown = (self._cue.unsqueeze(-1) == self._choices) & (self._time == 0).unsqueeze(-1)
        return torch.cat([shown, self._time.unsqueeze(-1) / self.length], -1).to(torch.float32)
