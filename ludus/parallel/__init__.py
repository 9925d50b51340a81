"""Supervised processes, memory that they share, and who computes where. Needs numpy and the standard library alone."""
