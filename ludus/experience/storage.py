"""Memory of a replay: ring buffers, the packed column of rewards and flags, and the queue of items to draw from."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.errors import UserError
from ludus.core.step import EnvStep
from ludus.core.types import Tensors
from ludus.experience import native

Integers = NDArray[np.int64]
Pieces = dict[str, list[Tensor]]  # by column, in order of time: one piece, or two where the ring wraps around
CACHE_LINE = 64  # bytes
FINAL = "final/"  # prefix of the columns of final observations
FLAGS = "flags"  # column of reward, terminated, truncated, first and real, packed into 8 bytes (PackedFlags)


class Ring:
    """Ring buffer with columns ``[batch, length, …]``; time t is at index t % length.

    The steps of one row are adjacent in memory, since a transition reads two of them.
    """

    def __init__(self, length: int, batch: int, device: torch.device, folder: str = "") -> None:
        self.length, self.batch, self.device, self.folder = length, batch, device, folder
        self.columns: Tensors = {}
        self.flat: Tensors = {}  # views [batch * length, …]

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Allocate a column of zeros, unless it exists."""
        if name not in self.columns:
            column = allocate((self.batch, self.length, *shape), dtype, self.device, self.folder)
            self.columns[name], self.flat[name] = column, column.flatten(0, 1)

    def save(self, rows: slice, low: int, high: int) -> Pieces:
        """Return views of the steps from time ``low`` to ``high`` of some rows."""
        spans = self._spans(low, high)
        return {name: [x[rows, span] for span in spans] for name, x in self.columns.items()}

    def load(self, rows: slice, high: int, pieces: Pieces) -> None:
        """Load what ``save`` returned; if it came from a longer ring, the newest steps."""
        for name, parts in pieces.items():
            time = high + 1 - sum(part.shape[1] for part in parts)
            for part in parts:
                self.add(name, tuple(part.shape[2:]), part.dtype)
                skip = max(0, min(high + 1 - self.length - time, part.shape[1]))
                start = skip
                for span in self._spans(time + skip, time + part.shape[1] - 1) if skip < part.shape[1] else []:
                    stop = start + span.stop - span.start
                    self.columns[name][rows, span].copy_(part[:, start:stop])
                    start = stop
                time += part.shape[1]

    def _spans(self, low: int, high: int) -> list[slice]:
        start, size = low % self.length, high - low + 1
        if start + size <= self.length:
            return [slice(start, start + size)]
        return [slice(start, self.length), slice(0, start + size - self.length)]


class PackedFlags:
    """Views of a column of 8 bytes per step; values that are read together are adjacent in memory."""

    DTYPE = torch.int64

    def __init__(self, column: Tensor) -> None:
        flags = column.unsqueeze(-1).view(torch.uint8)
        self.reward = column.unsqueeze(-1).view(torch.float32)[..., 0]
        self.terminated, self.truncated, self.first, self.real = (flags[..., i].view(torch.bool) for i in range(4, 8))


class SlotIndex:
    """Maps an item's number, time * batch + row, to its slot in memory, row * length + time % length, and back."""

    def __init__(self, length: int, batch: int) -> None:
        self.length, self.batch = length, batch
        self.now = np.zeros(batch, np.int64)  # by row: time of the last observation
        self.oldest = np.zeros(batch, np.int64)  # by row: oldest time that is still complete
        self._library = native.LIBRARY
        pointers = self.now.ctypes.data, self.oldest.ctypes.data
        self.pointer = ctypes.pointer(native.SlotIndex(length, batch, *pointers))  # for native.c

    def slots(self, numbers: Tensor, steps: int = 1, out: Tensor | None = None) -> Tensor:
        """Return the slots ``[steps, n]`` of items and of the steps after them."""
        out = torch.empty((steps, len(numbers)), dtype=torch.int64) if out is None else out
        if self._library is not None:
            numbers, count = numbers.long().contiguous(), numbers.numel()
            assert out.is_contiguous()
            assert out.numel() == steps * count
            self._library.ludus_slots(self.pointer, count, steps, numbers.data_ptr(), out.data_ptr())
            return out
        time, row = self.split(numbers.numpy())
        slots = out.numpy()
        np.remainder(np.add(time, np.arange(steps)[:, None], out=slots), self.length, out=slots)
        slots += row * self.length
        return out

    def numbers(self, slots: Tensor) -> Tensor:
        """Return the numbers of the newest items at slots."""
        row, slot = np.divmod(slots.numpy(), self.length)
        now = self.now[row]
        return torch.from_numpy((now - (now - slot) % self.length) * self.batch + row)

    def complete(self, numbers: Tensor) -> Tensor:
        """Whether items have not been overwritten."""
        time, row = self.split(numbers.numpy())
        return torch.from_numpy(time >= self.oldest[row])

    def split(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Return the times and the rows of items."""
        return (numbers // self.batch, numbers % self.batch) if self.batch > 1 else (numbers, np.zeros_like(numbers))


class RowGroup:
    """Rows that step together, and a queue of the numbers of items (transitions or sequences) that can be drawn.

    Numbers enter the queue in increasing order and leave it in the same order.
    """

    def __init__(self, rows: slice, capacity: int, device: torch.device) -> None:
        self.rows = rows
        self.row_numbers = np.arange(rows.start, rows.stop, dtype=np.int64)
        self.time, self.oldest, self.start_time = -1, 0, 0  # last observation, oldest complete one, first one written
        self.fresh = 0  # time of the first observation that ``ExperienceReplay.fresh`` has not returned
        # γ times each row's running return before that step, if ``fresh`` returns them
        self.carried = torch.zeros(rows.stop - rows.start, dtype=torch.float64, device=device)
        self.unroll = -1  # number of the last unroll that was received
        self.env_columns: list[Any] = []  # [rows, length, …]: first, real, reward, terminated, truncated, observations
        self.env_step: EnvStep | None = None  # last step written, and its arrays in the order of env_columns
        self.env_arrays: list[Any] = []
        self.agent_columns: list[Any] = []  # [rows, length, …]: actions and experience
        self._queue = np.zeros(capacity, np.int64)
        self._head, self._tail = 0, 0

    @property
    def size(self) -> int:
        """How many items can be drawn."""
        return self._tail - self._head

    @property
    def numbers(self) -> Integers:
        """All numbers in the queue, oldest first."""
        return self.pick(np.arange(self.size))

    def pick(self, positions: Integers) -> Integers:
        """Return the numbers at positions of the queue, counted from the oldest."""
        return self._queue.take(positions + self._head, mode="wrap")

    def push(self, numbers: Integers) -> None:
        """Append numbers."""
        start, size = self._tail % len(self._queue), len(numbers)
        fits = min(size, len(self._queue) - start)
        self._queue[start : start + fits] = numbers[:fits]
        if fits < size:
            self._queue[: size - fits] = numbers[fits:]
        self._tail += size

    def expire(self, before: int) -> Integers:
        """Remove the numbers below ``before`` and return them."""
        oldest = int(self._queue[self._head % len(self._queue)])
        candidates = self.pick(np.arange(min(self.size, max(0, before - oldest))))  # numbers are distinct
        expired = candidates[candidates < before]
        self._head += len(expired)
        return expired

    def take_back(self, since: int) -> Integers:
        """Remove the numbers from ``since`` on and return them."""
        newest = int(self._queue[(self._tail - 1) % len(self._queue)])
        candidates = self.pick(np.arange(self.size - min(self.size, max(0, newest + 1 - since)), self.size))
        removed = candidates[candidates >= since]
        self._tail -= len(removed)
        return removed


def as_numpy(x: Tensor) -> Any:
    """View a CPU tensor as a numpy array, which copies small tensors several times faster."""
    return x if x.dtype == torch.bfloat16 or not x.is_cpu else x.numpy()


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, folder: str = "") -> Tensor:
    """Allocate zeros on the device, or in an unnamed file in ``folder`` that is deleted with its last user."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape, dtype=np.int64))
    size = count * dtype.itemsize
    if not folder:  # numpy requests huge pages, which makes random access faster
        memory = np.zeros(size + CACHE_LINE, np.uint8)
        start = -memory.ctypes.data % CACHE_LINE
        return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix="ludus-replay-") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk raises here instead of killing the process at a write
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                os.truncate(file.fileno(), size)
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UserError(
            f'agent.replay_folder "{folder}" cannot hold a file of {size:,} bytes ({error.strerror}); choose another '
            "folder, or lower agent.replay."
        ) from error
    return torch.frombuffer(mapped, dtype=dtype, count=count).view(shape)
