"""The text log of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ludus.core.files import append, open_append
from ludus.core.text import printable


class LogFile:
    """Appends entries with a time stamp to ``log.txt``, unbuffered."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def warning(self, text: str) -> None:
        """Write a warning."""
        self.note(text, "warning")

    def note(self, text: str, kind: str = "note") -> None:
        """Write an entry."""
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {kind:<7} "
        lines = printable(text).removesuffix("\n").split("\n")
        entry = head + ("\n" + " " * len(head)).join(lines) + "\n"
        with open_append(self.path) as file:
            unfinished = file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
            append(file, ("\n" * unfinished + entry).encode(errors="backslashreplace"))
