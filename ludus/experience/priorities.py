"""Prioritized experience replay (Schaul et al. 2016)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ludus.experience import native
from ludus.experience.storage import SlotIndex
from ludus.experience.sum_tree import SumTree

EPSILON = 1e-6  # added to every |δ|, so that all items can be drawn
MAX_PENDING = 8192  # values that are written to the tree together, at most


class Priorities:
    """(|δ| + ε)^α of each item, 0 where nothing can be drawn. Writes are collected until the next draw."""

    def __init__(self, slot_index: SlotIndex, exponent: float) -> None:
        self.largest, self._exponent = 1.0, exponent  # the largest value so far is given to new items
        self._slot_index, self._library = slot_index, native.LIBRARY
        self._tree = SumTree(slot_index.batch * slot_index.length)
        self._numbers: list[Tensor] = []  # pending
        self._values: list[Tensor] = []
        self._pending = 0
        self._scratch = [torch.empty(0), torch.empty(0)]

    def add(self, numbers: Tensor) -> None:
        """Add new items, with the largest priority so far."""
        self.set(numbers, torch.full((len(numbers),), self.largest, dtype=torch.float64))

    def drop(self, numbers: Tensor) -> None:
        """Remove items."""
        self.set(numbers, torch.zeros(len(numbers), dtype=torch.float64))

    def set(self, numbers: Tensor, values: Tensor) -> None:
        """Write values; of repeated items, the last value counts."""
        self._numbers.append(numbers)
        self._values.append(values)
        self._pending += len(numbers)
        if self._pending > MAX_PENDING:
            self._write_pending()

    def get(self, numbers: Tensor) -> Tensor:
        """Return the values of items."""
        self._write_pending()
        return self._tree.get(self._slot_index.slots(numbers)[0])

    def update(self, numbers: Tensor, td_error: Tensor) -> None:
        """Set the priorities of items from their |δ|; those overwritten since are ignored."""
        if td_error.shape != numbers.shape:
            raise ValueError(
                f"{len(numbers)} items were read, but their priorities have shape {tuple(td_error.shape)}."
            )
        self._write_pending()
        values = td_error.float().add(EPSILON).pow_(self._exponent)
        if self._library is not None:
            numbers, scratch = numbers.long().contiguous(), self._scratch_for(len(numbers))
            pointers = numbers.data_ptr(), values.data_ptr(), scratch[0].data_ptr(), scratch[1].data_ptr()
            largest = self._library.ludus_update(self._tree.pointer, self._slot_index.pointer, len(numbers), *pointers)
            if largest >= 0.0:
                self._tree.stale = True
                self.largest = max(self.largest, largest)
                return
        complete = self._slot_index.complete(numbers)
        if complete.any():
            self._tree.set(self._slot_index.slots(numbers[complete])[0], values[complete].double())
            self.largest = max(self.largest, float(values[complete].max()))

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw items in proportion to their values, stratified; return them, and their values over the smallest."""
        self._write_pending()
        scratch = self._scratch_for(count)
        uniform = scratch[0].uniform_(generator=generator)
        if self._library is not None:
            numbers, ratio = torch.empty(count, dtype=torch.int64), torch.empty(count)
            pointers = uniform.data_ptr(), scratch[1].data_ptr(), numbers.data_ptr(), ratio.data_ptr()
            if not self._library.ludus_draw(self._tree.pointer, self._slot_index.pointer, count, *pointers):
                return numbers, ratio
        strata = np.arange(count, dtype=np.float64)
        strata += uniform.numpy()
        slots, values = self._tree.sample(torch.from_numpy(strata / count))
        return self._slot_index.numbers(slots), (values / values.amin()).to(torch.float32)

    def _scratch_for(self, count: int) -> list[Tensor]:
        """Return reused memory for ``count`` and for 3 * ``count`` numbers."""
        if len(self._scratch[0]) != count:
            memory = torch.empty(4 * count, dtype=torch.float64)
            self._scratch = [memory[:count], memory[count:]]
        return self._scratch

    def _write_pending(self) -> None:
        if self._pending:
            self._tree.set(self._slot_index.slots(torch.cat(self._numbers))[0], torch.cat(self._values))
            self._numbers, self._values, self._pending = [], [], 0
