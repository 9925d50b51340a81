"""Rank 2, unchanged."""

from __future__ import annotations

from ludus.networks.identity import Identity


class Identity2D(Identity):
    """Passes sequences on."""

    dim = 2
