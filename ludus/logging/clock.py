"""Time per phase."""

from __future__ import annotations

import time

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
