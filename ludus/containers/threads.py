"""Threads of a run: those of torch; numpy's BLAS has one."""

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
    """Set torch to ``number`` threads and BLAS to one; ``restore_original_limits`` of the result undoes it for BLAS.

    Threads of OpenBLAS go on spinning after a product, on the cores that torch's threads need: with 512 environments
    and numpy acting, an update took 1.6 times as long.
    """
    torch.set_num_threads(number)
    return threadpool_limits(1, user_api="blas")


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Use ``number`` threads of torch within this block."""
    before = torch.get_num_threads()
    limits = set_threads(number)
    try:
        yield
    finally:
        limits.restore_original_limits()
        torch.set_num_threads(before)
