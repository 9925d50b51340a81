"""A rich console that escapes control characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions
from rich.segment import Segment

from ludus.core.text import printable


class Console(rich.console.Console):
    """A rich console that escapes control characters in text that it prints."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
