"""Training progress on standard output: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, TextIO

from ludus.core.text import printable
from ludus.logging.rate import Rate
from ludus.logging.status import Evaluation, Status, duration

if TYPE_CHECKING:
    from ludus.logging.live import LiveDisplay

_REFRESH = 0.25  # minimum seconds between two redraws
_BUDGET = 0.005  # share of the time for drawing


class Console:
    """Shows the progress of a run; as a context manager it restores the terminal."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = None, every: float = 10.0) -> None:
        self._stream = sys.stdout if stream is None else stream
        if live is None:
            live = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._live: LiveDisplay | None = None
        if live:
            from ludus.logging.live import LiveDisplay  # imports rich, which takes a while

            self._live = LiveDisplay(self._stream)
        self.every = _REFRESH if live else every  # seconds between two updates of the display
        self._status = Status(total=0)
        self._rate = Rate()
        self._begun = self._next = 0.0
        self._running = False
        self._stale = True  # whether there are numbers that are not shown yet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, info: Mapping[str, str], total_steps: int, step: int = 0) -> None:
        """Print ``info`` and start to show progress from ``step`` to ``total_steps``."""
        self._status = Status(total=total_steps, step=step)
        self._begun = time.monotonic()
        self._next = self._begun + (0 if self._live else self.every)
        self._rate.update(step, self._begun)
        self._running = True
        if self._live:
            self._live.header(info)
            return
        width = max(map(len, info), default=0)
        for name, value in info.items():
            self._print(f"{name:<{width}}  {value}")

    def due(self) -> bool:
        """Whether the next ``update`` will be shown, so that callers can skip computing one that is not."""
        return time.monotonic() >= self._next

    def update(
        self,
        step: int,
        mean_return: float | None = None,
        episode_length: float | None = None,
        losses: Mapping[str, float] | None = None,
        shares: Mapping[str, float] | None = None,
        workers: Sequence[str] = (),
    ) -> None:
        """Show progress and metrics when due; call it after every update."""
        status = self._status
        status.step, self._stale = step, True
        status.mean_return, status.episode_length = mean_return, episode_length
        status.losses, status.shares, status.workers = losses or {}, shares or {}, workers
        now = time.monotonic()
        self._rate.update(step, now)
        if now >= self._next:
            self._show(now)

    def evaluated(self, step: int, mean: float, spread: float, episodes: int) -> None:
        """Show an evaluation: mean and standard deviation of the return over ``episodes`` episodes."""
        result = Evaluation(step, mean, spread, episodes)
        self._status.evaluation, self._status.step, self._stale = result, step, True
        if self._status.best is None or mean >= self._status.best.mean:
            self._status.best = result
        if self._live:
            self._show(time.monotonic())
        else:
            self._print(f"evaluation: {result} ({episodes} episodes)")

    @property
    def width(self) -> int:
        """Return the columns of the terminal; 1000 without one."""
        if self._live:
            return self._live.width
        return shutil.get_terminal_size().columns if self._stream.isatty() else 1000

    def urgent(self, text: str) -> None:
        """Print like ``note``, but from a signal handler, where the stream may be in the middle of a write."""
        if self._live:
            self._live.urgent(text)
        else:
            os.write(2, f"\n{text}\n".encode())  # unbuffered

    def note(self, text: str) -> None:
        """Print a permanent line."""
        if self._live:
            self._live.print(text)
        else:
            self._print(text)

    def finish(self) -> None:
        """Show the last metrics."""
        if self._running and (self._live or self._stale):
            self._show(time.monotonic())
        self.stop()

    def _show(self, now: float) -> None:
        self._stale = False
        self._status.rate, self._status.elapsed = self._rate.per_second(), now - self._begun
        if self._live:
            self._live.draw(self._status)
            cost = time.monotonic() - now
            self._next = now + max(self.every, cost / _BUDGET)  # redraw less often on a slow terminal
        else:
            self._print(f"{duration(self._status.elapsed):>7}  {self._status.line()}")
            self._next = now + self.every

    def stop(self) -> None:
        """Restore the terminal; may be called twice."""
        self._running = False
        if self._live:
            self._live.stop()

    def _print(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        print(printable(text).encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
