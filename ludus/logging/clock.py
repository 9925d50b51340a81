"""Time per phase and steps per second."""

from __future__ import annotations

import time
from collections import deque

PHASES = ("environment", "acting", "learning", "evaluation", "other")


class Clock:
    """Measures the time per phase; each lap adds the time since the previous one to its phase."""

    def __init__(self, phases: tuple[str, ...] = PHASES) -> None:
        self.nanoseconds = dict.fromkeys(phases, 0)
        self._last = time.perf_counter_ns()

    def lap(self, phase: str) -> None:
        """Add the time since the previous lap to ``phase``."""
        now = time.perf_counter_ns()
        self.nanoseconds[phase] += now - self._last
        self._last = now

    def shares(self) -> dict[str, float]:
        """Return the share of each phase, 0 to 1; all zero before the first lap."""
        total = sum(self.nanoseconds.values()) or 1
        return {phase: spent / total for phase, spent in self.nanoseconds.items()}


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
