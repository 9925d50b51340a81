"""The compiled inner loops of a replay: ``native.c``, built when Ludus is installed where there is a C compiler.

Without it all works, more slowly. ``LIBRARY`` says whether it is there.
"""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

from torch import Tensor

DEEPEST = 16  # levels of a tree
SOURCE = Path(__file__).with_name("native.c")
BUILT = SOURCE.with_name("_native.so")


class Tree(ctypes.Structure):
    """Where a sum tree lies; see native.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("capacity", "width", "levels", "tops")),
        ("flat", ctypes.c_void_p * DEEPEST),
        ("ends", ctypes.c_void_p),
    )


class SlotIndex(ctypes.Structure):
    """Where the items of a replay lie; see native.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("length", "batch")),
        *((name, ctypes.c_void_p) for name in ("now", "oldest")),
    )


class Column(ctypes.Structure):
    """Where rows are copied from and to; see native.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "out")),
        *((name, ctypes.c_int64) for name in ("bytes", "slots", "rows")),
    )


def load(path: Path = BUILT, source: Path = SOURCE) -> ctypes.CDLL | None:
    """The library, or None where there is none, or none that was built from this source."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    try:
        library = ctypes.CDLL(str(path))
        library.ludus_version.restype = number
        if library.ludus_version() != zlib.crc32(source.read_bytes()):
            return None
    except (OSError, AttributeError):
        return None
    for name, takes in (
        ("tree_set", [pointer, number, pointer, pointer]),
        ("tree_sample", [pointer, number, *[pointer] * 4]),
        ("tree_total", [pointer]),
        ("slots", [pointer, number, number, pointer, pointer]),
        ("draw", [pointer, pointer, number, *[pointer] * 4]),
        ("renew", [pointer, pointer, number, *[pointer] * 4]),
        ("gather", [pointer, number, pointer]),
    ):
        function = getattr(library, f"ludus_{name}")
        function.argtypes, function.restype = takes, number
    library.ludus_tree_total.restype = library.ludus_renew.restype = ctypes.c_double
    return library


def columns(pairs: list[tuple[Tensor, Tensor]]) -> ctypes.Array[Column] | None:
    """What ``gather`` wants to know of sources and outputs ``[rows, …]``; None where it cannot copy them."""
    if not all(x.device.type == "cpu" and x.is_contiguous() for pair in pairs for x in pair):
        return None
    told = ((source, out, source[:1].nbytes) for source, out in pairs)
    every = [Column(s.data_ptr(), o.data_ptr(), size, len(s), len(o)) for s, o, size in told]
    return (Column * len(every))(*every)


LIBRARY = load()
