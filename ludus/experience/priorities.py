"""Priorities of what a replay holds (Schaul et al. 2016)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ludus.experience import native
from ludus.experience.slot_index import SlotIndex
from ludus.experience.sum_tree import SumTree

SMALLEST = 1e-6  # added to every surprise, so that all can be drawn
WAITING = 8192  # changes that are made together, at the latest


class Priorities:
    """(|δ| + ε)^α of each item, 0 where nothing can be drawn; items that come and go wait until something is."""

    def __init__(self, places: SlotIndex, exponent: float) -> None:
        self.largest, self._exponent = 1.0, exponent  # the largest so far, which new items get
        self._places, self._tree, self._library = places, SumTree(places.batch * places.length), native.LIBRARY
        self._numbers: list[Tensor] = []
        self._values: list[Tensor] = []
        self._waiting = 0
        self._room = [torch.empty(0), torch.empty(0)]

    def add(self, numbers: Tensor) -> None:
        """Let new items be drawn: soon, as nothing is known of them."""
        self.set(numbers, torch.full((len(numbers),), self.largest, dtype=torch.float64))

    def drop(self, numbers: Tensor) -> None:
        """Let items be drawn no more."""
        self.set(numbers, torch.zeros(len(numbers), dtype=torch.float64))

    def set(self, numbers: Tensor, values: Tensor) -> None:
        """Write values; of an item that comes twice, the last stays."""
        self._numbers.append(numbers)
        self._values.append(values)
        self._waiting += len(numbers)
        if self._waiting > WAITING:
            self._write_pending()

    def get(self, numbers: Tensor) -> Tensor:
        """The values of items."""
        self._write_pending()
        return self._tree.get(self._places.slots(numbers)[0])

    def update(self, numbers: Tensor, surprise: Tensor) -> None:
        """Take how far off the learner was; what has expired is ignored."""
        if surprise.shape != numbers.shape:
            raise ValueError(
                f"{len(numbers)} items were read, but their priorities have shape {tuple(surprise.shape)}."
            )
        self._write_pending()
        values = surprise.float().add(SMALLEST).pow_(self._exponent)
        if self._library is not None:
            numbers, room = numbers.long().contiguous(), self._room_for(len(numbers))
            where = numbers.data_ptr(), values.data_ptr(), room[0].data_ptr(), room[1].data_ptr()
            largest = self._library.ludus_renew(self._tree.pointer, self._places.pointer, len(numbers), *where)
            if largest >= 0.0:
                self._tree.stale = True
                self.largest = max(self.largest, largest)
                return
        held = self._places.held(numbers)
        if held.any():
            self._tree.set(self._places.slots(numbers[held])[0], values[held].double())
            self.largest = max(self.largest, float(values[held].max()))

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Numbers in proportion to their values, one from each ``count``-th of the sum; and values over the least."""
        self._write_pending()
        room = self._room_for(count)
        uniform = room[0].uniform_(generator=generator)
        if self._library is not None:
            numbers, ratio = torch.empty(count, dtype=torch.int64), torch.empty(count)
            where = uniform.data_ptr(), room[1].data_ptr(), numbers.data_ptr(), ratio.data_ptr()
            if not self._library.ludus_draw(self._tree.pointer, self._places.pointer, count, *where):
                return numbers, ratio
        parts = np.arange(count, dtype=np.float64)
        parts += uniform.numpy()
        slots, values = self._tree.sample(torch.from_numpy(parts / count))
        return self._places.numbers(slots), (values / values.amin()).to(torch.float32)

    def _room_for(self, count: int) -> list[Tensor]:
        """Memory for 4 * ``count`` numbers, used again and again; the first as many alone."""
        if len(self._room[0]) != count:
            room = torch.empty(4 * count, dtype=torch.float64)
            self._room = [room[:count], room[count:]]
        return self._room

    def _write_pending(self) -> None:
        if self._waiting:
            several = len(self._numbers) > 1
            numbers, values = (torch.cat(x) if several else x[0] for x in (self._numbers, self._values))
            self._tree.set(self._places.slots(numbers)[0], values)
            self._numbers, self._values, self._waiting = [], [], 0
