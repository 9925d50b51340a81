"""Sum tree: draws batches of indices with probabilities proportional to their values."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.experience import native
from ludus.experience.storage import Integers, allocate

# values per block, and the largest top level, over which a running sum is computed
COMPILED = 16, 512  # a block is two cache lines
PLAIN = 48, 32_768  # with numpy and torch, a level costs more than a long sum
Numbers = NDArray[np.float64]


class SumTree:
    """``capacity`` values ≥ 0 in float64, the sum of every 16 of them, the sum of every 16 sums, and so on.

    A sum is always recomputed from its block, from left to right, and never incremented. So rounding errors do not
    accumulate, the sums depend on the values alone, and neither the order of calls nor a reload changes what is drawn.
    native.c is used where it is compiled, else torch and numpy on the same memory, whichever is faster. With equal
    block sizes both draw the same, bit for bit; the default block sizes differ, and so may the last digit of a sum.
    """

    def __init__(self, capacity: int) -> None:
        self._library = native.LIBRARY
        self._width, top = PLAIN if self._library is None else COMPILED
        sizes = [capacity]
        while sizes[-1] > top:
            sizes.append(-(-sizes[-1] // self._width))
        blocks = [allocate((size, self._width), torch.float64, torch.device("cpu")) for size in sizes[1:]]
        self._levels = [x.numpy() for x in blocks]  # [blocks, values], from the leaves up
        self._top = np.zeros(sizes[-1])
        self._flat = [*(level.reshape(-1) for level in self._levels), self._top]
        self._leaves = self._flat[0][:capacity]
        self._ends = np.zeros(len(self._top) + 1)  # 0, then the running sum over the top
        self.stale = False  # whether the top has changed since the running sum was computed
        levels = (ctypes.c_void_p * native.MAX_LEVELS)(*(x.ctypes.data for x in self._flat))
        tree = native.Tree(capacity, self._width, len(self._levels), len(self._top), levels, self._ends.ctypes.data)
        self.pointer = ctypes.pointer(tree)  # for native.c

    @property
    def total(self) -> float:
        """The sum of all values."""
        if self.stale:
            self.stale = False
            if self._library is not None:
                self._library.ludus_tree_total(self.pointer)
            else:
                torch.cumsum(torch.from_numpy(self._top), 0, out=torch.from_numpy(self._ends[1:]))
        return float(self._ends[-1])

    @property
    def values(self) -> Tensor:
        """All values ``[capacity]``, as a view; they determine the whole tree."""
        return torch.from_numpy(self._leaves)

    def get(self, index: Tensor) -> Tensor:
        """Return the values at ``index``, as float64."""
        return torch.from_numpy(self._leaves.take(index.numpy()))

    def set(self, index: Tensor, value: Tensor) -> None:
        """Write values at indices from 0 to capacity − 1; of a repeated index, the last value counts."""
        self.stale = True
        if self._library is not None:
            index, value = index.long().contiguous(), value.double().expand(len(index)).contiguous()
            if not self._library.ludus_tree_set(self.pointer, len(index), index.data_ptr(), value.data_ptr()):
                return
        self._set(index.numpy(), value.numpy())  # raises the error if native.c refused the input

    def sample(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return an index of a value > 0 for each number in [0, 1), with probability value / total, and the values.

        Sorted numbers are faster, as memory is then read in order.
        """
        total = self.total
        if not 0.0 < total < np.inf:
            raise ValueError(f"Nothing can be drawn from priorities that sum to {total}.")
        if self._library is not None:
            uniform = uniform.double().contiguous()
            index = torch.empty(len(uniform), dtype=torch.int64)
            rest, value = torch.empty_like(uniform), torch.empty_like(uniform)
            pointers = uniform.data_ptr(), rest.data_ptr(), index.data_ptr(), value.data_ptr()
            if not self._library.ludus_tree_sample(self.pointer, len(uniform), *pointers):
                return index, value
        index = torch.from_numpy(self._sample(uniform.numpy(), total))
        return index, self.get(index)

    def _set(self, nodes: Integers, values: NDArray[Any]) -> None:
        low, high = np.minimum.reduce(values, initial=0.0), np.maximum.reduce(values, initial=0.0)
        if not (low >= 0.0 and high < np.inf):  # NaN fails too
            raise ValueError(
                f"Priorities must be finite and not negative, but the new ones range from {low} to {high}."
            )
        self._leaves[nodes] = values  # of equal indices numpy writes the last one last, unlike torch
        for level, above in zip(self._levels, self._flat[1:], strict=True):
            nodes = nodes // self._width
            above[nodes] = _running_sums(level, nodes).numpy()[:, -1]

    def _sample(self, uniform: NDArray[Any], total: float) -> Integers:
        # ``rest`` is clamped below the sum of its block, which it may reach by rounding. So the first running sum above
        # it is greater than the one before, and the child's value is not 0.
        rest = np.minimum(np.multiply(uniform, total, dtype=np.float64), np.nextafter(total, 0.0))  # [n]
        nodes = self._ends.searchsorted(rest, "right")
        nodes -= 1
        rest -= self._ends.take(nodes)
        for level in reversed(self._levels):
            running = _running_sums(level, nodes)  # [n, width]
            sums = running.numpy()
            np.minimum(rest, np.nextafter(sums[:, -1], 0.0), out=rest)
            child = torch.searchsorted(running, torch.from_numpy(rest[:, None]), right=True).numpy()[:, 0]
            nodes *= self._width
            nodes += child
            if level is not self._levels[0]:
                before = np.arange(len(child)) * self._width + child - 1
                rest -= np.where(child > 0, sums.reshape(-1).take(before), 0.0)
        return nodes  # type: ignore[no-any-return]


def _running_sums(level: Numbers, nodes: Integers) -> Tensor:
    """Return the running sums within the block of each node, from left to right ``[n, width]``."""
    return torch.from_numpy(level.take(nodes, 0)).cumsum_(1)
