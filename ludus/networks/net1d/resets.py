"""Resets inside fused recurrent kernels, which know none: one more step before each ``first`` clears the state."""

from __future__ import annotations

import torch
from torch import Tensor

GATE_INPUT = 1e4  # opens or closes a gate exactly: sigmoid(±1e4) is 1 or 0, with zero gradient


class Resets:
    """The time indices of a sequence ``[T, B]`` after a step was inserted before each ``first`` except at t = 0.

    Rows with fewer resets than others are padded at the end. This takes less time than splitting the sequences at every
    ``first`` and padding the parts, which took up to 7 times as long.
    """

    def __init__(self, first: Tensor) -> None:
        time, self.batch = first.shape
        first = torch.cat([torch.zeros_like(first[:1]), first[1:]])
        step = torch.arange(time, device=first.device).unsqueeze(1) + first.cumsum(0)  # [T, B]: new time of each row
        self.length = int(step[-1].max()) + 1
        self.rows = (step * self.batch + torch.arange(self.batch, device=first.device)).reshape(-1)
        self.reset_rows = (self.rows - self.batch)[first.reshape(-1)]

    def insert(self, x: Tensor) -> Tensor:
        """Return ``x`` ``[T, B, F]`` as ``[length, B, F]``, zero at all other steps."""
        longer = x.new_zeros(self.length * self.batch, x.shape[-1]).index_copy(0, self.rows, x.flatten(0, 1))
        return longer.view(self.length, self.batch, -1)

    def remove(self, y: Tensor) -> Tensor:
        """Return the steps of the original sequence ``[T, B, F]`` among ``[length, B, F]``."""
        return y.flatten(0, 1).index_select(0, self.rows).view(-1, self.batch, y.shape[-1])
