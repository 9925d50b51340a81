"""Pieces that take volumes or clips ``[F, D, H, W]``."""
