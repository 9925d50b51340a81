"""The log of a run: plain text, a time on every entry."""

from __future__ import annotations

import time
from pathlib import Path


class LogFile:
    """Appends entries to ``log.txt``; every entry is on disk when the call returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, text: str) -> None:
        """Write what a person may want to know later."""
        self._append("note", text)

    def warning(self, text: str) -> None:
        """Write what a person should look at."""
        self._append("warning", text)

    def _append(self, kind: str, text: str) -> None:
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {kind:<7} "
        lines = text.splitlines() or [""]
        entry = head + ("\n" + " " * len(head)).join(lines) + "\n"
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(entry)
