"""Nests of plain values and arrays as bytes, and back: JSON with the arrays' bytes behind it, nothing pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

ARRAY = "__array__"  # marks the place of an array: [dtype, shape, first byte]
START = 8  # bytes that say how long the JSON is


def pack(tree: Any) -> bytes:
    """Write dicts, lists, plain values and arrays down."""
    parts: list[bytes] = []
    text = json.dumps(_strip(tree, parts)).encode()
    return b"".join([len(text).to_bytes(START, "little"), text, *parts])


def unpack(data: bytes) -> Any:
    """Read what ``pack`` wrote; the arrays are copies."""
    end = START + int.from_bytes(data[:START], "little")
    return _fill(json.loads(data[START:end]), data, end)


def write_message(fd: int, tree: Any) -> None:
    """Make a message the whole content of a file in memory."""
    data = memoryview(pack(tree))
    os.ftruncate(fd, 0)
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], written)


def read_message(fd: int) -> Any:
    """Read the message in a file in memory."""
    data, size = bytearray(), os.fstat(fd).st_size
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return unpack(bytes(data))


def _strip(tree: Any, parts: list[bytes]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _strip(value, parts) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_strip(value, parts) for value in tree]
    if isinstance(tree, np.ndarray):
        start = sum(map(len, parts))
        parts.append(np.ascontiguousarray(tree).tobytes())
        return {ARRAY: [tree.dtype.str, list(tree.shape), start]}
    return tree.item() if isinstance(tree, np.generic) else tree


def _fill(tree: Any, data: bytes, end: int) -> Any:
    if isinstance(tree, list):
        return [_fill(value, data, end) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if ARRAY in tree:
        dtype, shape, start = tree[ARRAY]
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(data, dtype, count, end + start).reshape(shape).copy()
    return {key: _fill(value, data, end) for key, value in tree.items()}
