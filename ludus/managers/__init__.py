"""Managers step many environments as one batch, each with next-step autoreset."""
