"""Pieces that take vectors ``[F]``."""
