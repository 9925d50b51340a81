"""Pieces that take volumes and clips ``[F, D, H, W]``."""
