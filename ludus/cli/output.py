"""Printing of commands."""

from __future__ import annotations

from ludus.core.text import printable


def say(text: object) -> None:
    """Print a line with control characters escaped."""
    print(printable(str(text)), flush=True)
