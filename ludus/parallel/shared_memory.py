"""Anonymous shared memory, which is freed with the last process that holds it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.errors import UserError

Fields = Mapping[str, tuple[Sequence[int], str]]  # name → (shape, dtype), as plain values
ALIGNED = 64  # bytes, a cache line: two writers never share one


class Block:
    """Named numpy arrays in one block of shared memory, initially zero.

    Another process maps the same arrays with ``Block(fields, fd)``, which takes ownership of the file descriptor.
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

    def with_prefix(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the arrays whose names start with ``prefix``, by the rest of their names."""
        return {name.removeprefix(prefix): x for name, x in self.arrays.items() if name.startswith(prefix)}

    def close(self) -> None:
        """Release the memory; existing views stay valid and keep it alive."""
        if self._map is None:
            return
        self.arrays, held, self._map = {}, self._map, None
        with suppress(BufferError):  # views exist
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
            raise UserError(f"Cannot allocate {self.size:,} bytes of shared memory: {error.strerror}.") from error
        return fd
