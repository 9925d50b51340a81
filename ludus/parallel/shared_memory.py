"""Memory that processes share: it has no name on disk and is gone with its last holder, however that ends."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.errors import UserError

Fields = Mapping[str, tuple[Sequence[int], str]]  # name → (shape, dtype): plain, so that it can cross to a process
ALIGNED = 64  # bytes: a cache line, so that two writers never share one


class Block:
    """Named numpy arrays in one piece of shared memory, zero at first; ``torch.from_numpy`` views them without a copy.

    A process that is given the file descriptor makes the same arrays with ``Block(fields, fd)``, and owns it then.
    """

    def __init__(self, fields: Fields, fd: int | None = None) -> None:
        sizes = {name: int(np.prod(shape, dtype=np.int64)) for name, (shape, _) in fields.items()}
        starts, size = dict[str, int](), 0
        for name, (_, dtype) in fields.items():
            starts[name] = size
            size += -(-sizes[name] * np.dtype(dtype).itemsize // ALIGNED) * ALIGNED
        self.size = max(size, ALIGNED)
        self.fd = self._make() if fd is None else fd
        if os.fstat(self.fd).st_size < self.size:
            has = os.fstat(self.fd).st_size
            os.close(self.fd)
            raise ValueError(f"the memory has {has} bytes, the fields need {self.size}")
        self._map: mmap.mmap | None = mmap.mmap(self.fd, self.size)
        self.arrays: dict[str, NDArray[Any]] = {
            name: np.frombuffer(self._map, dtype, sizes[name], starts[name]).reshape(tuple(shape))
            for name, (shape, dtype) in fields.items()
        }

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    def close(self) -> None:
        """Let go of it; views that others still hold stay valid, and the memory lives until they go."""
        if self._map is None:
            return
        self.arrays, held, self._map = {}, self._map, None
        with suppress(BufferError):  # there are views
            held.close()
        os.close(self.fd)

    def _make(self) -> int:
        if not hasattr(os, "memfd_create"):
            raise UserError("Shared memory needs Linux; elsewhere set env.backend to simple or vector.")
        fd = os.memfd_create("ludus-block", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, self.size)
        except OSError as error:
            os.close(fd)
            raise UserError(f"There is no room for {self.size:,} bytes of shared memory: {error.strerror}.") from error
        return fd
