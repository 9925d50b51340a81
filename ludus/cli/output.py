"""Printing for commands."""

from __future__ import annotations

from ludus.core.text import printable


def say(text: object) -> None:
    """Print a line for a person, with control characters of names and paths escaped."""
    print(printable(str(text)), flush=True)
