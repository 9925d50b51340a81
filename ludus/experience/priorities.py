"""Priorities of what a replay holds (Schaul et al. 2016)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ludus.experience.sum_tree import SumTree
from ludus.experience.track import Integers

SMALLEST = 1e-6  # added to every surprise, so that all can be drawn
WAITING = 8192  # changes that are made together, at the latest

Reals = NDArray[np.float64]


class Priorities:
    """(|δ| + ε)^α of each slot, 0 where nothing can be drawn; changes wait until something is."""

    def __init__(self, capacity: int, exponent: float) -> None:
        self.largest, self._exponent = 1.0, exponent  # the largest so far, which new items get
        self._tree = SumTree(capacity)
        self._slots: list[Integers] = []
        self._values: list[Reals] = []
        self._waiting = 0
        self._parts = torch.empty(0)

    def add(self, slots: Integers) -> None:
        """Let new items be drawn: soon, as nothing is known of them."""
        self.set(slots, np.full(len(slots), self.largest))

    def drop(self, slots: Integers) -> None:
        """Let items be drawn no more."""
        self.set(slots, np.zeros(len(slots)))

    def update(self, slots: Integers, surprise: Reals) -> None:
        """Take how far off the learner was."""
        if len(slots):
            values = torch.from_numpy(surprise + SMALLEST).pow_(self._exponent).numpy()  # half of numpy's time
            self.largest = max(self.largest, float(values.max()))
            self.set(slots, values)

    def set(self, slots: Integers, values: Reals) -> None:
        """Write values; of a slot that comes twice, the last stays."""
        self._slots.append(slots)
        self._values.append(values)
        self._waiting += len(slots)
        if self._waiting > WAITING:
            self._settle()

    def get(self, slots: Integers) -> torch.Tensor:
        """The values at slots."""
        self._settle()
        return self._tree.get(torch.from_numpy(slots))

    def draw(self, count: int, generator: torch.Generator) -> tuple[Integers, Reals]:
        """Slots in proportion to their values, one from each ``count``-th of the sum, and these values."""
        self._settle()
        if len(self._parts) != count:
            self._parts = torch.arange(count, dtype=torch.float64)
        uniform = torch.rand(count, dtype=torch.float64, generator=generator).add_(self._parts).div_(count)
        slots = self._tree.sample(uniform)
        return slots.numpy(), self._tree.get(slots).numpy()

    def _settle(self) -> None:
        if self._waiting:
            several = len(self._slots) > 1
            joined = (np.concatenate(x) if several else x[0] for x in (self._slots, self._values))
            self._tree.set(*map(torch.from_numpy, joined))
        self._slots, self._values, self._waiting = [], [], 0
