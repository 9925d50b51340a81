"""Where the items of a replay lie."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from ludus.experience import native
from ludus.experience.row_group import Integers


class SlotIndex:
    """Names items: a number, time * batch + row, which only grows; a slot, row * length + time % length, for memory."""

    def __init__(self, length: int, batch: int) -> None:
        self.length, self.batch = length, batch
        self.now = np.zeros(batch, np.int64)  # by row: the time of its last observation
        self.oldest = np.zeros(batch, np.int64)  # and of the oldest that is whole
        self._library = native.LIBRARY
        told = native.SlotIndex(length, batch, self.now.ctypes.data, self.oldest.ctypes.data)
        self.pointer = ctypes.pointer(told)  # for compiled code

    def slots(self, numbers: Tensor, steps: int = 1, out: Tensor | None = None) -> Tensor:
        """The slots ``[steps, n]`` of items and of the steps after them."""
        out = torch.empty((steps, len(numbers)), dtype=torch.int64) if out is None else out
        if self._library is not None:
            numbers = numbers.long().contiguous()
            assert out.is_contiguous()
            assert out.shape == (steps, len(numbers))
            self._library.ludus_slots(self.pointer, len(numbers), steps, numbers.data_ptr(), out.data_ptr())
            return out
        time, row = self.split(numbers.numpy())
        slots = out.numpy()
        np.remainder(np.add(time, np.arange(steps)[:, None], out=slots), self.length, out=slots)
        if self.batch > 1:
            slots += row * self.length
        return out

    def numbers(self, slots: Tensor) -> Tensor:
        """The numbers of the newest items at slots."""
        row, slot = np.divmod(slots.numpy(), self.length)
        now = self.now[row]
        return torch.from_numpy((now - (now - slot) % self.length) * self.batch + row)

    def held(self, numbers: Tensor) -> Tensor:
        """Whether items are whole yet."""
        time, row = self.split(numbers.numpy())
        return torch.from_numpy(time >= self.oldest[row])

    def split(self, numbers: Integers) -> tuple[Integers, Integers]:
        """The times and the rows of items."""
        return (numbers // self.batch, numbers % self.batch) if self.batch > 1 else (numbers, np.zeros_like(numbers))
