"""Load the compiled inner loops of the replay: ``native.c``, built on installation if there is a C compiler.

``LIBRARY`` is None where it is not compiled; torch and numpy then do the same work more slowly.
"""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

from torch import Tensor

MAX_LEVELS = 16  # of a sum tree
SOURCE = Path(__file__).with_name("native.c")
BUILT = SOURCE.with_name("_native.so")


class Tree(ctypes.Structure):
    """Pointers of a sum tree; see native.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("capacity", "width", "levels", "tops")),
        ("flat", ctypes.c_void_p * MAX_LEVELS),
        ("ends", ctypes.c_void_p),
    )


class SlotIndex(ctypes.Structure):
    """Pointers of a SlotIndex; see native.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("length", "batch")),
        *((name, ctypes.c_void_p) for name in ("now", "oldest")),
    )


class Column(ctypes.Structure):
    """Source and destination of rows to copy; see native.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "out")),
        *((name, ctypes.c_int64) for name in ("bytes", "slots", "rows")),
    )


def load(path: Path = BUILT, source: Path = SOURCE) -> ctypes.CDLL | None:
    """Return the library, or None if it is missing or was built from another source."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    try:
        library = ctypes.CDLL(str(path))
        library.ludus_version.restype = number
        if library.ludus_version() != zlib.crc32(source.read_bytes()):
            return None
    except (OSError, AttributeError):
        return None
    for name, arguments in (
        ("tree_set", [pointer, number, pointer, pointer]),
        ("tree_sample", [pointer, number, *[pointer] * 4]),
        ("tree_total", [pointer]),
        ("slots", [pointer, number, number, pointer, pointer]),
        ("draw", [pointer, pointer, number, *[pointer] * 4]),
        ("update", [pointer, pointer, number, *[pointer] * 4]),
        ("gather", [pointer, number, pointer]),
    ):
        function = getattr(library, f"ludus_{name}")
        function.argtypes, function.restype = arguments, number
    library.ludus_tree_total.restype = library.ludus_update.restype = ctypes.c_double
    return library


def columns(pairs: list[tuple[Tensor, Tensor]]) -> ctypes.Array[Column] | None:
    """Return the arguments of ``gather`` for pairs of source and output ``[rows, …]``; None if it cannot copy them."""
    if not all(x.device.type == "cpu" and x.is_contiguous() for pair in pairs for x in pair):
        return None
    return (Column * len(pairs))(
        *(Column(x.data_ptr(), out.data_ptr(), x[:1].nbytes, len(x), len(out)) for x, out in pairs)
    )


LIBRARY = load()
