"""Rank 1, unchanged."""

from __future__ import annotations

from ludus.networks.identity import Identity


class Identity1D(Identity):
    """Passes vectors on."""

    dim = 1
