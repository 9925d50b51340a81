"""Sums of arrays over the processes of one machine, in shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.parallel.shared_memory import ALIGNED, Block

COUNTERS = ALIGNED // 8  # int64 per cache line
SPIN = 1e-3  # seconds for which a process does not sleep while it waits, since waking up takes longer than most sums
LONGEST_NAP = 5e-3  # seconds
CHECK = 0.1  # seconds between two calls of ``check``


class SharedSum:
    """Sums arrays of at most ``nbytes`` bytes over ``size`` processes, which all call ``sum`` in the same order.

    Every process writes its term to one of its two slots in turn and counts it, waits until the others have counted
    theirs, and adds the terms up in the order of ranks, so that all get the same result. It may write to a slot again
    two sums later, when all others have counted the sum between the two, and so have read the slot.

    Other processes get the file descriptor ``fd``. Stores must become visible in their order, as on x86-64.
    """

    def __init__(self, rank: int, size: int, nbytes: int, fd: int | None = None) -> None:
        self.rank, self.size, self.nbytes = rank, size, -(-nbytes // ALIGNED) * ALIGNED
        fields = {"counts": ((size * COUNTERS,), "int64"), "terms": ((2, size, self.nbytes), "uint8")}
        self._block = Block(fields, fd)
        self.fd = self._block.fd
        self._counts, self._terms = self._block["counts"].data, self._block["terms"]
        self._count = 0

    def sum(self, x: NDArray[Any], check: Callable[[float], object]) -> NDArray[Any]:
        """Return the sum of ``x`` over all processes, which give arrays of the same shape and type.

        While it waits, ``check`` is called now and then with the seconds so far; it raises to end the wait.
        """
        self._count += 1
        terms = self._terms[self._count % 2, :, : x.nbytes].view(x.dtype)  # [size, n]
        terms[self.rank] = x.reshape(-1)
        self._counts[self.rank * COUNTERS] = self._count
        for other in range(self.size):
            if self._counts[other * COUNTERS] < self._count:
                self._wait(other * COUNTERS, check)
        total: NDArray[Any] = np.add.reduce(terms, 0, dtype=x.dtype)
        return total.reshape(x.shape)

    def _wait(self, counter: int, check: Callable[[float], object]) -> None:
        began, checked = time.monotonic(), 0.0
        while self._counts[counter] < self._count:
            waited = time.monotonic() - began
            if waited < SPIN:
                os.sched_yield()  # to a process that has no core of its own
                continue
            if waited > checked + CHECK:
                checked = waited
                check(waited)
            time.sleep(min(waited / 10, LONGEST_NAP))

    def close(self) -> None:
        """Release the memory; may be called twice."""
        self._counts, self._terms = memoryview(b""), np.zeros(0, np.uint8)
        self._block.close()
