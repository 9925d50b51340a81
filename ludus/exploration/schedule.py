"""Numbers that change over a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["constant", "linear", "exponential"]


@dataclass(frozen=True)
class Schedule:
    """A number that goes from ``start`` to ``end`` over the first ``share`` of a run, and stays there.

    ``constant`` stays at ``start``; ``linear`` changes by the same amount at every step, ``exponential`` by the same
    factor, for which both ends must be greater than 0.
    """

    kind: Kind
    start: float
    end: float
    share: float = 1.0

    def at(self, progress: float) -> float:
        """The value where ``progress`` (0 to 1) of the run is done."""
        if self.kind == "constant":
            return self.start
        done = min(max(progress / self.share, 0.0), 1.0)
        if self.kind == "linear":
            return self.start * (1 - done) + self.end * done  # exact at both ends
        return float(self.start ** (1 - done) * self.end**done)
