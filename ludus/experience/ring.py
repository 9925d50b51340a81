"""Where a replay keeps its steps: tensors that are written round and round, in memory or in files."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import torch
from torch import Tensor

from ludus.core.errors import UserError
from ludus.core.types import Tensors

LINE = 64  # bytes of a processor's cache that come together
Parts = dict[str, list[Tensor]]  # by column, steps in the order of time: one piece, or two where the ring wraps


class Ring:
    """Columns ``[batch, length, …]``; time t is at slot t % length.

    One row's steps lie side by side in memory, since a transition is two of them.
    """

    def __init__(self, length: int, batch: int, device: torch.device, folder: str = "") -> None:
        self.length, self.batch, self.device, self.folder = length, batch, device, folder
        self.columns: Tensors = {}
        self.flat: Tensors = {}  # the same as [batch * length, …]

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Make a column of zeros, if there is none of that name."""
        if name not in self.columns:
            column = allocate((self.batch, self.length, *shape), dtype, self.device, self.folder)
            self.columns[name], self.flat[name] = column, column.flatten(0, 1)

    def save(self, rows: slice, low: int, high: int) -> Parts:
        """The steps from time ``low`` to ``high`` of some rows, as views."""
        spans = self._spans(low, high)
        return {name: [x[rows, span] for span in spans] for name, x in self.columns.items()}

    def load(self, rows: slice, high: int, parts: Parts) -> None:
        """Take back what ``save`` gave; of a longer ring, the newest."""
        for name, pieces in parts.items():
            time = high + 1 - sum(piece.shape[1] for piece in pieces)
            for piece in pieces:
                self.add(name, tuple(piece.shape[2:]), piece.dtype)
                gone = max(0, min(high + 1 - self.length - time, piece.shape[1]))
                self._write(name, rows, time + gone, piece[:, gone:])
                time += piece.shape[1]

    def _write(self, name: str, rows: slice, low: int, steps: Tensor) -> None:
        start = 0
        for span in self._spans(low, low + steps.shape[1] - 1) if steps.shape[1] else []:
            size = span.stop - span.start
            self.columns[name][rows, span].copy_(steps[:, start : start + size])
            start += size

    def _spans(self, low: int, high: int) -> list[slice]:
        start, size = low % self.length, high - low + 1
        if start + size <= self.length:
            return [slice(start, start + size)]
        return [slice(start, self.length), slice(0, start + size - self.length)]


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, folder: str = "") -> Tensor:
    """Zeros: on the device, or in a file in ``folder`` that has no name and goes with its last user."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape, dtype=np.int64))
    size = count * dtype.itemsize
    if not folder:  # numpy asks for large pages, which makes it faster to look here and there
        room = np.zeros(size + LINE, np.uint8)
        start = -room.ctypes.data % LINE
        return torch.from_numpy(room[start : start + size]).view(dtype).view(shape)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix="ludus-replay-") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and a dead process at a later write
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                os.truncate(file.fileno(), size)
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UserError(
            f'agent.replay_folder "{folder}" cannot hold a file of {size:,} bytes ({error.strerror}); choose another '
            "folder, or lower agent.replay."
        ) from error
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
