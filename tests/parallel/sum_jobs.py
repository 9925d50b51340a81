"""Functions that sum in child processes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ludus.parallel.shared_sum import SharedSum

SIZES = (1, 7, 1000)
TYPES = ("float32", "float64", "int64", "uint8")


def terms(rank: int, count: int) -> list[np.ndarray]:
    """The arrays that a rank adds, one after the other."""
    rng = np.random.default_rng(rank)
    shapes = [((), TYPES[2]), *(((2, n), kind) for n in SIZES for kind in TYPES)]
    return [(rng.normal(0, 20, shape) + 40).astype(kind) for _ in range(count) for shape, kind in shapes]


def never(waited: float) -> None:
    if waited > 60:
        raise TimeoutError


def add(settings: dict[str, Any], fds: dict[str, int]) -> None:
    """Add all terms, with pauses now and then; raise if a result is not that of rank 0."""
    rank, ranks, count = settings["rank"], settings["ranks"], settings["count"]
    shared = SharedSum(rank, ranks, settings["nbytes"], fds["sum"])
    for i, x in enumerate(terms(rank, count)):
        if i % (7 + rank) == 0:
            time.sleep(0.002)
        total = shared.sum(x, never)
        if i % 5 == 0:  # what it got, as a term of another sum
            assert (shared.sum(total, never) == (total * ranks).astype(x.dtype)).all()
