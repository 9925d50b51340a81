"""Rank 4, unchanged."""

from __future__ import annotations

from ludus.networks.identity import Identity


class Identity4D(Identity):
    """Passes volumes on."""

    dim = 4
