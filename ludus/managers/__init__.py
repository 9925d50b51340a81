"""Managers step many environments as one batch."""
