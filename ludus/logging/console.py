"""Progress for the user: a live display on a terminal, plain lines elsewhere.

Both go to standard output: the progress of a training is what its command is for.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self, TextIO

from ludus.core.text import printable
from ludus.logging.clock import Rate
from ludus.logging.status import Evaluation, Status, duration

if TYPE_CHECKING:
    from ludus.logging.live import LiveDisplay

_REFRESH = 0.25  # seconds between two pictures, at least
_BUDGET = 0.005  # of the time may go into drawing


class Console:
    """Shows a run; as a context manager it restores the terminal."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = None, every: float = 10.0) -> None:
        self._stream = sys.stdout if stream is None else stream
        if live is None:
            live = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._live = _live_display(self._stream) if live else None
        self._every = _REFRESH if live else every  # seconds from one showing to the next
        self._status = Status(total=0)
        self._rate = Rate()
        self._begun = self._next = 0.0
        self._running = False
        self._stale = True  # whether there are numbers that were not shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def start(self, info: Mapping[str, str], total_steps: int, step: int = 0) -> None:
        """Print what runs and start to show progress towards ``total_steps`` (from ``step``, for a resumed run)."""
        self._status = Status(total=total_steps, step=step)
        self._begun = time.monotonic()
        self._next = self._begun + (0 if self._live else self._every)
        self._rate.update(step, self._begun)
        self._running = True
        if self._live:
            self._live.header(info)
        else:
            self._lines(info)

    def due(self) -> bool:
        """Whether the next ``update`` will be shown, so that a caller computes nothing for others."""
        return time.monotonic() >= self._next

    def update(
        self,
        step: int,
        mean_return: float | None = None,
        episode_length: float | None = None,
        losses: Mapping[str, float] | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """Show progress and metrics when due; call it after every update."""
        status = self._status
        status.step, self._stale = step, True
        status.mean_return, status.episode_length = mean_return, episode_length
        status.losses, status.shares = losses or {}, shares or {}
        now = time.monotonic()
        self._rate.update(step, now)
        if now >= self._next:
            self._show(now)

    def evaluated(self, step: int, mean: float, spread: float, episodes: int) -> None:
        """Show an evaluation: ``episodes`` fresh ones with this mean return and standard deviation."""
        result = Evaluation(step, mean, spread, episodes)
        self._status.evaluation, self._status.step, self._stale = result, step, True
        if self._status.best is None or mean > self._status.best.mean:
            self._status.best = result
        if self._live:
            self._show(time.monotonic())
        else:
            self._print(f"evaluation: {result} ({episodes} episodes)")

    @property
    def width(self) -> int:
        """Columns of the terminal; far more than any text has where there is none."""
        if self._live:
            return self._live.width
        return shutil.get_terminal_size().columns if self._stream.isatty() else 1000

    def urgent(self, text: str) -> None:
        """As ``note``, from a signal handler: the stream may be in the middle of a write."""
        if self._live:
            self._live.urgent(text)
        else:
            os.write(2, f"\n{text}\n".encode())  # not buffered, so never busy

    def note(self, text: str) -> None:
        """Print something that stays on the screen."""
        if self._live:
            self._live.print(text)
        else:
            self._print(text)

    def finish(self, summary: Mapping[str, str] | None = None) -> None:
        """Show the last metrics, the result and the next commands."""
        if self._running and (self._live or self._stale):
            self._show(time.monotonic())
        self._stop()
        if summary:
            self._print("")
            self._lines(summary)

    def _show(self, now: float) -> None:
        self._stale = False
        self._status.rate, self._status.elapsed = self._rate.per_second(), now - self._begun
        if self._live:
            self._live.draw(self._status)
            cost = time.monotonic() - now
            self._next = now + max(self._every, cost / _BUDGET)  # a slow terminal is drawn less often
        else:
            self._print(f"{duration(self._status.elapsed):>7}  {self._status.line()}")
            self._next = now + self._every

    def _stop(self) -> None:
        self._running = False
        if self._live:
            self._live.stop()

    def _lines(self, items: Mapping[str, str]) -> None:
        width = max(map(len, items), default=0)
        for name, value in items.items():
            self._print(f"{name:<{width}}  {value}")

    def _print(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        print(printable(text).encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)


def _live_display(stream: TextIO) -> LiveDisplay:
    from ludus.logging.live import LiveDisplay  # rich takes a while to import, and a log file has no use for it

    return LiveDisplay(stream)
