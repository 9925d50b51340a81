"""Serialize nested plain values and arrays: JSON followed by the arrays' bytes, no pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

ARRAY = "__array__"  # key that stands for an array in the JSON: [dtype, shape, offset]
HEADER = 8  # bytes, the length of the JSON


def pack(tree: Any) -> bytes:
    """Serialize dicts, lists, plain values and arrays."""
    parts: list[bytes] = []
    text = json.dumps(_extract_arrays(tree, parts), default=_refuse).encode()
    return b"".join([len(text).to_bytes(HEADER, "little"), text, *parts])


def unpack(data: bytes) -> Any:
    """Deserialize the result of ``pack``; the arrays are copies."""
    end = HEADER + int.from_bytes(data[:HEADER], "little")
    return _insert_arrays(json.loads(data[HEADER:end]), data, end)


def write_message(fd: int, tree: Any) -> None:
    """Replace the content of a memory file by a message."""
    data = memoryview(pack(tree))
    os.ftruncate(fd, 0)
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], written)


def read_message(fd: int) -> Any:
    """Read the message in a memory file."""
    data, size = bytearray(), os.fstat(fd).st_size
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return unpack(bytes(data))


def _extract_arrays(tree: Any, parts: list[bytes]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _extract_arrays(value, parts) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_extract_arrays(value, parts) for value in tree]
    if isinstance(tree, np.ndarray) and not tree.dtype.hasobject:
        start = sum(map(len, parts))
        parts.append(np.ascontiguousarray(tree).tobytes())
        return {ARRAY: [tree.dtype.str, list(tree.shape), start]}
    return tree.item() if isinstance(tree, np.generic) else tree


def _refuse(value: object) -> NoReturn:
    raise TypeError(
        f"a {type(value).__name__} cannot be sent to another process; send numbers, text, None, lists, dicts and numpy "
        "arrays of numbers"
    )


def _insert_arrays(tree: Any, data: bytes, end: int) -> Any:
    if isinstance(tree, list):
        return [_insert_arrays(value, data, end) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if ARRAY in tree:
        dtype, shape, start = tree[ARRAY]
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(data, dtype, count, end + start).reshape(shape).copy()
    return {key: _insert_arrays(value, data, end) for key, value in tree.items()}
