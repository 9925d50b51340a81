"""Some rows of a rollout as views by time step, and the memory of a rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors

ENDING = ("reward", "terminated", "truncated")


class RolloutRows:
    """Rows that are written together: their views by time step, made once, as indexing costs more than the copy."""

    def __init__(self, rows: slice, blocks: Tensors) -> None:
        self.rows = rows
        self.cursor = -1  # the time step of the last observation; -1 before the first
        self.state, self.last_state = HiddenState(), HiddenState()
        self.view(blocks)

    def view(self, blocks: Tensors) -> None:
        """Look at the blocks that there are; what the agent says comes later than the first observation."""
        views = {name: list(x[:, self.rows].unbind(0)) for name, x in blocks.items()}
        self.observation = [x for name, x in views.items() if name.startswith("observation/")]
        self.said = [x for kind in ("action/", "experience/") for name, x in views.items() if name.startswith(kind)]
        self.first, self.reward, self.terminated, self.truncated = (views[name] for name in ("first", *ENDING))

    def carry(self, length: int) -> None:
        """Make the last observation the first of the next rollout."""
        for rows in (*self.observation, self.first):
            rows[0].copy_(rows[length])
        self.state, self.cursor = self.last_state, 0


def block(length: int, batch: int, x: Tensor, device: torch.device) -> Tensor:
    """Zeros ``[length, batch, …]``; images ``[B, C, H, W]`` lie channels-last, so that no update has to turn them."""
    if x.dim() == 4 and x.shape[1] < min(x.shape[2:]):
        channels, height, width = x.shape[1:]
        return torch.zeros(length, batch, height, width, channels, dtype=x.dtype, device=device).movedim(-1, 2)
    return torch.zeros((length, batch, *x.shape[1:]), dtype=x.dtype, device=device)
