"""The live region of a terminal, drawn with rich: a bar, the numbers, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ludus.track.status import Status, percent
from ludus.track.terminal import Console

_PHASES = (("█", "green"), ("▓", "cyan"), ("▒", "magenta"), ("░", "bright_black"))  # told apart without colours too
_LABEL = 13  # columns before the numbers


class LiveDisplay:
    """Prints what stays, and redraws what changes; it draws when told to and has no thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None

    def header(self, info: Mapping[str, str]) -> None:
        """Print what runs."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for name, value in info.items():
            table.add_row(Text(name), Text(value))
        self._console.print(
            Panel(table, title="[bold]ludus", title_align="left", border_style="cyan", width=self._width())
        )

    def draw(self, status: Status) -> None:
        """Redraw the live region."""
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True)
            self._live.start()
        self._live.update(render(status, self._width()), refresh=True)

    def print(self, text: str) -> None:
        """Print a line that stays, above the live region."""
        self._console.print(Text(text))

    def stop(self) -> None:
        """Leave the last picture and give the terminal back; may be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _width(self) -> int:
        return min(self._console.width, 100)


def render(status: Status, width: int) -> Text:
    """The live region as one text: far cheaper to draw than tables, so that training hardly notices."""
    text = Text(no_wrap=True, overflow="ellipsis")
    _progress(text, status, width - 2)
    for topic, cells in status.rows().items():
        label = topic
        for line in _fold(cells, width - _LABEL - 2):
            text.append(f"\n  {label:<{_LABEL}}", "dim").append(line.replace("+-", "±"))
            label = ""
    if status.shares:
        _shares(text, status.shares, width - _LABEL - 2)
    return text


def _progress(text: Text, status: Status, width: int) -> None:
    tail = f" {percent(status.done):>4}  {status.step:,} of {status.total:,} steps"
    size = max(width - len(tail), 10)
    full = int(size * status.done)
    text.append("  ").append("━" * full, "green" if status.done >= 1 else "cyan")
    text.append("─" * (size - full), "bright_black").append(tail, "bold")


def _shares(text: Text, shares: Mapping[str, float], width: int) -> None:
    """One bar with a pattern and a colour for each phase, and their names below it."""
    size, spent, column = min(width - 2, 60), 0.0, 0
    text.append(f"\n  {'time':<{_LABEL}}", "dim")
    for (block, colour), share in zip(_PHASES, shares.values(), strict=False):
        spent += share
        text.append(block * (round(size * spent) - column), colour)
        column = round(size * spent)
    column = width  # so that the names begin on a line of their own
    for (block, colour), (phase, share) in zip(_PHASES, shares.items(), strict=False):
        name = f"{block} {phase} {percent(share)}  "
        if column + len(name) > width + 2:
            text.append(f"\n  {'':<{_LABEL}}")
            column = 0
        text.append(name, colour)
        column += len(name)
    text.rstrip()


def _fold(cells: list[str], width: int) -> list[str]:
    lines = [cells[0]]
    for cell in cells[1:]:
        longer = f"{lines[-1]}   {cell}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(cell)
    return lines
