"""Pieces that take sequences ``[F, S]``."""
