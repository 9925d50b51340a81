"""The console of a run in another process than that of the command, which shows it."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ludus.logging.console import Console

LIMIT = 10_000  # messages that wait for a command that is suspended; older ones are dropped
LATER = 1.05  # updates are sent this much less often than they are shown, so that each one is due when it arrives
Message = tuple[str, tuple[Any, ...]]  # method of Terminal, or of its console, and its arguments


class OpenedRun(NamedTuple):
    """A run that has begun in another process."""

    path: str
    settings: dict[str, Any]
    origins: dict[str, str]


class RemoteTerminal:
    """The terminal of the command, in the process of the run: collects messages, which the command asks for."""

    def __init__(self) -> None:
        self.every, self.width = 10.0, 1000  # seconds between two updates of the display; columns
        self._opened: list[Message] = []  # is never dropped
        self._waiting: deque[Message] = deque(maxlen=LIMIT)
        self._changed = threading.Condition()

    def send(self, what: str, *arguments: Any) -> None:
        """Add a message."""
        with self._changed:
            self._waiting.append((what, arguments))
            self._changed.notify()

    def take(self, seconds: float) -> list[Message]:
        """Wait for messages, for at most ``seconds``, and return them."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._opened, seconds)
            taken, self._opened = [*self._opened, *self._waiting], []
            self._waiting.clear()
            return taken

    @property
    def idle(self) -> bool:
        """Whether no message waits."""
        return not self._waiting

    def opened(self, run: Path, settings: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        """Tell the folder of the run, which can be resumed from now on, and its settings with their origins."""
        with self._changed:
            self._opened = [("opened", (OpenedRun(str(run), dict(settings), dict(origins)),))]
            self._changed.notify()


class RemoteConsole(Console):
    """A console whose calls are made by the process of the command."""

    def __init__(self, terminal: RemoteTerminal) -> None:
        super().__init__(live=False, every=terminal.every * LATER)
        self._terminal = terminal

    def start(self, info: Mapping[str, str], total_steps: int, step: int = 0) -> None:
        self._terminal.send("start", dict(info), total_steps, step)

    def due(self) -> bool:
        return super().due() and self._terminal.idle

    def update(
        self,
        step: int,
        mean_return: float | None = None,
        episode_length: float | None = None,
        losses: Mapping[str, float] | None = None,
        shares: Mapping[str, float] | None = None,
        workers: Sequence[str] = (),
    ) -> None:
        numbers = dict(losses or {}), dict(shares or {}), list(workers)
        self._terminal.send("update", step, mean_return, episode_length, *numbers)
        self._next = time.monotonic() + self.every

    def evaluated(self, step: int, mean: float, spread: float, episodes: int) -> None:
        self._terminal.send("evaluated", step, mean, spread, episodes)

    @property
    def width(self) -> int:
        return self._terminal.width

    def urgent(self, text: str) -> None:
        self._terminal.send("urgent", text)

    def note(self, text: str) -> None:
        self._terminal.send("note", text)

    def finish(self) -> None:
        self._terminal.send("finish")


class RemoteStream(io.TextIOBase):
    """A stream (``stdout`` or ``stderr``) whose text is written by the process of the command."""

    encoding = "utf-8"

    def __init__(self, terminal: RemoteTerminal, name: str) -> None:
        self._terminal, self._name = terminal, name

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._terminal.send("write", self._name, text)
        return len(text)


class Terminal:
    """The terminal in the process of the command: shows the messages of a ``RemoteTerminal``."""

    def __init__(self, quiet: bool) -> None:
        self.console = None if quiet else Console()
        self.run: OpenedRun | None = None  # once there is one

    @property
    def shape(self) -> tuple[float, int]:
        """Return the seconds between two updates, and the columns."""
        return (10.0, 1000) if self.console is None else (self.console.every, self.console.width)

    def show(self, messages: Sequence[Message]) -> None:
        """Do what the messages say."""
        for what, arguments in messages:
            if what == "opened":
                (self.run,) = arguments
            elif what == "write":
                name, text = arguments
                print(text, end="", file=getattr(sys, name), flush=True)
            elif self.console is not None:
                getattr(self.console, what)(*arguments)

    def note(self, text: str) -> None:
        """Print a line, unless the run is quiet."""
        if self.console is not None:
            self.console.note(text)

    def close(self) -> None:
        """Restore the terminal."""
        if self.console is not None:
            self.console.stop()
