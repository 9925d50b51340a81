"""Threads of a run: torch and numpy's BLAS use the same number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

from ludus.settings.settings import MAXIMUM

VARIABLE = "OMP_NUM_THREADS"


def requested_threads() -> int:
    """Return OMP_NUM_THREADS (the first of a list), or 0 if it is not set."""
    first = os.environ.get(VARIABLE, "").split(",")[0].strip()
    return min(int(first), MAXIMUM["threads"]) if first.isascii() and first.isdigit() else 0


def set_threads(number: int) -> threadpool_limits:
    """Set torch and BLAS to ``number`` threads; ``restore_original_limits`` of the result undoes it for BLAS."""
    torch.set_num_threads(number)
    return threadpool_limits(number, user_api="blas")


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Use ``number`` threads within this block."""
    before = torch.get_num_threads()
    limits = set_threads(number)
    try:
        yield
    finally:
        limits.restore_original_limits()
        torch.set_num_threads(before)
