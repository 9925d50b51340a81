"""The pages of docs/ list every piece with its arguments and defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.networks import SUBMODULES
from ludus.networks.pieces import piece_arguments, piece_class

DOCS = Path(__file__).parents[2] / "docs"


def toml(value: object) -> str:
    """Return a default as one would write it in a setting."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


@pytest.mark.parametrize("name", SUBMODULES)
def test_page_has_the_piece_and_its_arguments(name: str) -> None:
    cls = piece_class(name, "piece")
    page = (DOCS / f"networks_{cls.dim}d.md").read_text(encoding="utf-8")
    (row,) = [
        line for line in page.splitlines() if line.startswith((f"| `{name}` |", f"| `{name}` ↻ |")) and "→" in line
    ]
    assert ("↻" in row) == cls.recurrent
    cell = row.split("|")[3]
    expected = {
        f"`{argument}" if default is None else f"`{argument}={toml(default)}`"
        for argument, default in piece_arguments(cls).items()
    }
    assert all(argument in cell for argument in expected)
    assert cell.count("`network.") + cell.count("=") == len(expected)
