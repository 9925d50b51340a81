"""The actions since each row's reset: with the episode's seed, all that brings a deterministic environment back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.spec import Specs
from ludus.environments.spaces import Arrays

LONGEST = 200_000  # steps of an episode that are kept; a longer one cannot be replayed
LARGEST = 2**29  # bytes of actions that are kept, whatever their number
SMALLEST = 64  # steps that a block has room for


class History:
    """The actions of the running episodes of some rows, ``[time, rows, …]`` by name, as the environments took them.

    Each row has a position of its own where its episode starts; what lies before all of them is dropped when room is
    needed. A row whose episode is too long is given up until its next one.
    """

    def __init__(self, specs: Specs, rows: int, longest: int = LONGEST) -> None:
        self._specs, self._rows = specs, rows
        step = sum(rows * spec.size * np.dtype(spec.dtype).itemsize for spec in specs.values())
        self._longest_call = min(longest, LARGEST // step)
        self._start = np.zeros(rows, np.int64)  # -1: given up
        self._count = 0
        self._allocate(SMALLEST)

    def record(self, actions: Arrays) -> None:
        """Take the actions of one step, ``[rows, …]``."""
        if self._count == self._room:
            self._make_room()
        count = self._count
        for name, block in self._blocks:
            block[count] = actions[name]
        self._count = count + 1

    def begin(self, begun: NDArray[Any] | slice | int) -> None:
        """Start the episodes of these rows after the step that was recorded last."""
        self._start[begun] = self._count

    def actions(self, row: int) -> Arrays | None:
        """The actions of a row's episode, ``[n, …]`` by name; None if it is too long."""
        start = int(self._start[row])
        if start < 0 or self._count - start > self._longest_call:
            return None
        return {name: block[start : self._count, row] for name, block in self._blocks}

    def load(self, rows: Sequence[Arrays | None]) -> None:
        """Take over the actions of all rows."""
        lengths = [-1 if actions is None else len(next(iter(actions.values()))) for actions in rows]
        self._count = max(0, *lengths)
        self._allocate(self._count + SMALLEST)
        blocks = dict(self._blocks)
        for row, (actions, length) in enumerate(zip(rows, lengths, strict=True)):
            self._start[row] = -1 if actions is None else self._count - length
            for name, x in (actions or {}).items():
                blocks[name][self._count - length : self._count, row] = x

    def _allocate(self, room: int) -> None:
        self._room = room
        self._blocks = [
            (name, np.zeros((room, self._rows, *spec.shape), spec.dtype)) for name, spec in self._specs.items()
        ]

    def _make_room(self) -> None:
        """Drop what no row needs any more, and see to it that at least half of the block is free."""
        self._start[(self._start >= 0) & (self._count - self._start > self._longest_call)] = -1
        running = self._start >= 0
        front = int(self._start[running].min(initial=self._count))
        kept, old = self._count - front, self._blocks
        if 2 * kept > self._room:
            self._allocate(2 * self._room)
        for (_, block), (_, source) in zip(self._blocks, old, strict=True):
            block[:kept] = source[front : self._count]  # numpy copes with the overlap
        self._start[running] -= front
        self._count = kept
