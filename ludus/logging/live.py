"""The live display on a terminal, drawn with rich: progress bar, metrics and time per phase."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ludus.logging.status import Status, percent
from ludus.logging.terminal import Console

_PHASES = (  # distinguishable without colours too
    *(("█", "green"), ("▓", "cyan"), ("▒", "magenta"), ("▚", "yellow")),
    ("░", "bright_black"),
)
_LABEL = 13  # columns before the numbers


class LiveDisplay:
    """Prints lines and redraws the live display on request, without a thread."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None
        self._busy = False  # in the middle of a write
        self._waiting: list[str] = []  # printed by a signal handler meanwhile

    @property
    def width(self) -> int:
        """Return the columns of the terminal."""
        return self._console.width

    def header(self, info: Mapping[str, str]) -> None:
        """Print a panel with ``info``."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for name, value in info.items():
            table.add_row(Text(name), Text(value))
        width = min(self.width, 100)
        with self._writing():
            self._console.print(Panel(table, title="[bold]ludus", title_align="left", border_style="cyan", width=width))

    def draw(self, status: Status) -> None:
        """Redraw the live region."""
        with self._writing():
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True)
                self._live.start()
            self._live.update(render(status, min(self.width, 100)), refresh=True)

    def print(self, text: str) -> None:
        """Print a permanent line above the live region."""
        with self._writing():
            self._console.print(Text(text))

    def urgent(self, text: str) -> None:
        """Print from a signal handler, after the current write if there is one."""
        self._waiting.append(text)
        if not self._busy:
            with suppress(RuntimeError), self._writing():  # raised while others write to the stream
                pass

    def stop(self) -> None:
        """Leave the last display and restore the terminal; may be called twice."""
        with self._writing():
            if self._live is not None:
                self._live.stop()
                self._live = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Defer the output of signal handlers until the block ends."""
        before, self._busy = self._busy, True
        try:
            yield
            while self._waiting:
                self._console.print(Text(self._waiting[0]))
                del self._waiting[0]
        finally:
            self._busy = before


def render(status: Status, width: int) -> Text:
    """Render the live display as one text, which is faster to draw than tables."""
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
    if len(tail) + 10 > width:
        tail = f" {percent(status.done):>4}  {status.step:,}/{status.total:,}"
    size = max(width - len(tail), 3)
    full = int(size * status.done)
    text.append("  ").append("━" * full, "green" if status.done >= 1 else "cyan")
    text.append("─" * (size - full), "bright_black").append(tail, "bold")


def _shares(text: Text, shares: Mapping[str, float], width: int) -> None:
    """Append a bar with a pattern and a colour per phase, and the names of the phases below it."""
    size, spent, column = min(width - 2, 60), 0.0, 0
    text.append(f"\n  {'time':<{_LABEL}}", "dim")
    for (block, colour), share in zip(_PHASES, shares.values(), strict=False):
        spent += share
        text.append(block * (round(size * spent) - column), colour)
        column = round(size * spent)
    column = width  # start the names on a new line
    for (block, colour), (phase, share) in zip(_PHASES, shares.items(), strict=False):
        name = f"{block} {phase} {percent(share)}"
        if column and column + 2 + len(name) <= width:
            name = f"  {name}"
        elif column:
            text.append(f"\n  {'':<{_LABEL}}")
            column = 0
        text.append(name, colour)
        column += len(name)


def _fold(cells: list[str], width: int) -> list[str]:
    """Join cells to lines of at most ``width``, separated by three spaces."""
    first, *rest = [part for cell in cells for part in textwrap.wrap(cell, max(width, 1))]
    lines = [first]
    for cell in rest:
        longer = f"{lines[-1]}   {cell}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(cell)
    return lines
