"""Schedules of a value over a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["constant", "linear", "exponential"]


@dataclass(frozen=True)
class Schedule:
    """A value that goes from ``start`` to ``end`` over the first ``share`` of a run and then stays at ``end``.

    ``constant`` stays at ``start``. ``exponential`` changes by the same factor at every step, so both ends must be
    greater than 0.
    """

    kind: ScheduleKind
    start: float
    end: float
    share: float = 1.0

    def at(self, progress: float) -> float:
        """Return the value at ``progress``, the fraction of the run that is done."""
        if self.kind == "constant":
            return self.start
        done = min(max(progress / self.share, 0.0), 1.0)
        if self.kind == "linear":
            return self.start * (1 - done) + self.end * done  # exact at both ends
        return float(self.start ** (1 - done) * self.end**done)
