"""Rank 3, unchanged."""

from __future__ import annotations

from ludus.networks.identity import Identity


class Identity3D(Identity):
    """Passes images on."""

    dim = 3
