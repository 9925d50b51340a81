"""Rows of a replay that are written together: their time, views of where they write, and what can be drawn of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.step import EnvStep
from ludus.experience.ring import Ring

Integers = NDArray[np.int64]
CHUNK = 64  # time steps whose views are made at once, since indexing costs more than the copy
FINAL = "final/"  # the prefix of the columns of last observations
ARRIVAL = "arrival"  # the column of reward, terminated, truncated, first and real, as they came with an observation


def plain(x: Tensor) -> Any:
    """The same memory as a numpy array, where there can be one: that way, a small copy takes a fifth of the time."""
    return x if x.dtype == torch.bfloat16 or not x.is_cpu else x.numpy()


class Arrival:
    """Views of a column of 8 bytes each: what is read together should lie together."""

    DTYPE = torch.int64

    def __init__(self, column: Tensor) -> None:
        flags = column.unsqueeze(-1).view(torch.uint8)
        self.reward = column.unsqueeze(-1).view(torch.float32)[..., 0]
        self.terminated, self.truncated, self.first, self.real = (flags[..., i].view(torch.bool) for i in range(4, 8))


class RowGroup:
    """Rows that step together, and a queue of the items (transitions, or starts of sequences) that can be drawn.

    An item is named by its number, time * batch + row. Numbers enter in their order and expire in it.
    """

    def __init__(self, rows: slice, ring: Ring, capacity: int, seen: list[str], said: list[str]) -> None:
        self.rows, self._ring = rows, ring
        self._names = seen, said  # columns of observations, and of what the agent says, in the order of writing
        self.all = np.arange(rows.start, rows.stop, dtype=np.int64)
        self.time, self.oldest, self.since = -1, 0, 0  # of the last observation, the oldest whole one, the first ever
        self._numbers = np.zeros(capacity, np.int64)
        self._head, self._tail = 0, 0
        self._low, self._high = 0, 0  # the slots that views were made of
        self.heard: list[list[Any]] = []  # by slot: of the arrival's parts and of observations
        self.said: list[list[Any]] = []
        self._step: EnvStep | None = None
        self._arrays: list[Any] = []

    @property
    def size(self) -> int:
        """How many items can be drawn."""
        return self._tail - self._head

    @property
    def numbers(self) -> Integers:
        """All that can be drawn, oldest first."""
        return self.pick(np.arange(self.size))

    def pick(self, positions: Integers) -> Integers:
        """The numbers at positions of the queue, counted from the oldest."""
        return self._numbers.take(positions + self._head, mode="wrap")

    def at(self) -> int:
        """Where the views of the current time are."""
        slot = self.time % self._ring.length
        if not self._low <= slot < self._high:
            self._low, self._high = slot, min(slot + CHUNK, self._ring.length)
            self.view()
        return slot - self._low

    def view(self) -> None:
        """Make the views of these slots, of all the columns that there are by now."""
        chunk = {name: x[self.rows, self._low : self._high] for name, x in self._ring.columns.items()}
        seen, self.said = ([_slots(chunk[name]) for name in names] for names in self._names)
        arrival = Arrival(chunk[ARRIVAL])
        parts = (arrival.first, arrival.real, arrival.reward, arrival.terminated, arrival.truncated)
        self.heard = [*(_slots(x) for x in parts), *seen]

    def arrays(self, step: EnvStep, observations: list[str]) -> list[Any]:
        """What a step has for ``heard``; a manager uses the same memory again and again, so it is looked up once."""
        if step is not self._step:
            parts = (step.first, step.real, step.reward, step.terminated, step.truncated)
            self._step = step
            self._arrays = [plain(x) for x in (*parts, *(step.observation[name] for name in observations))]
        return self._arrays

    def push(self, numbers: Integers) -> None:
        """Let these be drawn from now on."""
        start, size = self._tail % len(self._numbers), len(numbers)
        fits = min(size, len(self._numbers) - start)
        self._numbers[start : start + fits] = numbers[:fits]
        if fits < size:
            self._numbers[: size - fits] = numbers[fits:]
        self._tail += size

    def expire(self, before: int) -> tuple[int, int]:
        """Forget the items whose numbers are below ``before``; return their places, for ``between``."""
        head, reach = self._head, 1
        while head + reach < self._tail and self._number(head + reach) < before:  # few expire at once: look near first
            reach *= 2
        self._head = self._bound(before, head, min(head + reach, self._tail))
        return head, self._head

    def take_back(self, since: int) -> Integers:
        """Take out the items whose numbers are ``since`` or above, and return them."""
        tail, self._tail = self._tail, self._bound(since, self._head, self._tail)
        return self.between(self._tail, tail)

    def _bound(self, number: int, low: int, high: int) -> int:
        """The first place from ``low`` on that holds ``number`` or more; ``high`` if none before it does."""
        while low < high:
            middle = (low + high) // 2
            if self._number(middle) < number:
                low = middle + 1
            else:
                high = middle
        return low

    def _number(self, place: int) -> int:
        return int(self._numbers[place % len(self._numbers)])

    def between(self, low: int, high: int) -> Integers:
        """The numbers at places of the queue, also of those that have just left it."""
        return self._numbers.take(np.arange(low, high), mode="wrap")


def _slots(column: Tensor) -> list[Any]:
    """``[rows, …]`` of every time step of ``[rows, times, …]``."""
    return list(plain(column.transpose(0, 1)))
