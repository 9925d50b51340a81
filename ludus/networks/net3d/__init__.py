"""Pieces that take images ``[F, H, W]``."""
