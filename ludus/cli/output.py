"""Printing of commands."""

from __future__ import annotations

from collections.abc import Mapping

from ludus.core.text import printable


def say(text: object) -> None:
    """Print a line with control characters escaped."""
    print(printable(str(text)), flush=True)


def by_agent(returns: Mapping[str, float]) -> str:
    """Format the returns of several agents, whose mean may always be 0; empty for a single agent."""
    return f" ({', '.join(f'{agent} {x:.2f}' for agent, x in returns.items())})" if returns else ""
