"""Actions since each row's reset, which restore a deterministic environment together with the episode's seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.spec import Specs
from ludus.environments.spaces import Arrays

MAX_STEPS = 200_000  # of an episode; a longer one cannot be restored
MAX_BYTES = 2**29  # of all actions
MIN_CAPACITY = 64  # steps


class ActionHistory:
    """The actions of the running episodes of some rows, ``[time, rows, …]`` by name, as the environments took them.

    Actions before the starts of all running episodes are dropped when the memory is full. Those of an episode that is
    too long are dropped too.
    """

    def __init__(self, specs: Specs, rows: int, max_steps: int = MAX_STEPS) -> None:
        self._specs, self._rows = specs, rows
        step = sum(rows * spec.size * np.dtype(spec.dtype).itemsize for spec in specs.values())
        self._max_steps = min(max_steps, MAX_BYTES // step)
        self._start = np.zeros(rows, np.int64)  # time at which each episode starts; -1: it is too long
        self._count = 0
        self._allocate(MIN_CAPACITY)

    def append(self, actions: Arrays) -> None:
        """Append the actions of one step, ``[rows, …]``."""
        if self._count == self._capacity:
            self._make_room()
        count = self._count
        for name, block in self._blocks:
            block[count] = actions[name]
        self._count = count + 1

    def start(self, rows: NDArray[Any] | slice | int) -> None:
        """Start new episodes in some rows."""
        self._start[rows] = self._count

    def actions(self, row: int) -> Arrays | None:
        """Return the actions of a row's episode, ``[n, …]`` by name; None if it is too long."""
        start = int(self._start[row])
        if start < 0 or self._count - start > self._max_steps:
            return None
        return {name: block[start : self._count, row] for name, block in self._blocks}

    def load(self, rows: Sequence[Arrays | None]) -> None:
        """Load the actions of all rows."""
        lengths = [-1 if actions is None else len(next(iter(actions.values()))) for actions in rows]
        self._count = max(0, *lengths)
        self._allocate(self._count + MIN_CAPACITY)
        blocks = dict(self._blocks)
        for row, (actions, length) in enumerate(zip(rows, lengths, strict=True)):
            self._start[row] = -1 if actions is None else self._count - length
            for name, x in (actions or {}).items():
                blocks[name][self._count - length : self._count, row] = x

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks = [
            (name, np.zeros((capacity, self._rows, *spec.shape), spec.dtype)) for name, spec in self._specs.items()
        ]

    def _make_room(self) -> None:
        """Drop actions that no row needs, and make at least half of the memory free."""
        self._start[(self._start >= 0) & (self._count - self._start > self._max_steps)] = -1
        running = self._start >= 0
        front = int(self._start[running].min(initial=self._count))
        kept, old = self._count - front, self._blocks
        if 2 * kept > self._capacity:
            self._allocate(2 * self._capacity)
        for (_, block), (_, source) in zip(self._blocks, old, strict=True):
            block[:kept] = source[front : self._count]  # numpy handles the overlap
        self._start[running] -= front
        self._count = kept
