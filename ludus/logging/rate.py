"""Steps per second."""

from __future__ import annotations

import time
from collections import deque


class Rate:
    """Steps per second over the last ``window`` seconds."""

    def __init__(self, window: float = 10.0) -> None:
        self._window = window
        self._marks: deque[tuple[float, int]] = deque()

    def update(self, step: int, now: float | None = None) -> None:
        """Record that ``step`` steps are done (at ``now`` on the monotonic clock)."""
        now = time.monotonic() if now is None else now
        while len(self._marks) > 1 and now - self._marks[1][0] >= self._window:
            self._marks.popleft()
        if len(self._marks) > 1 and now - self._marks[-2][0] < self._window / 100:
            self._marks.pop()  # at most a hundred marks, however often this is called
        self._marks.append((now, step))

    def per_second(self) -> float:
        """Return the recent rate; 0 before the second update."""
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:
            return 0.0
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start)
