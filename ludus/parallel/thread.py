"""A thread whose exception reaches the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Thread(threading.Thread):
    """A daemon thread that calls ``function(*arguments)``; ``join`` raises the exception that ended it.

    The exception keeps the traceback of the thread. ``result`` is what the function returned.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._function, self._arguments = function, arguments
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Call the function; ``start`` does so in the new thread."""
        try:
            self.result = self._function(*self._arguments)
        except BaseException as error:
            self.error = error

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends, at most ``timeout`` seconds; raise its exception, if there was one."""
        super().join(timeout)
        if self.error is not None:
            raise self.error
