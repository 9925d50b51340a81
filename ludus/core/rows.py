"""Which rows of a run are here."""

from __future__ import annotations

from typing import NamedTuple


class Rows(NamedTuple):
    """The rows ``start`` to ``stop`` of all ``total`` rows of a synchronous run.

    Seeds, noise and what else differs by row follow the number of the row in the whole run, so that a row has the same
    in whatever process it is.
    """

    start: int
    stop: int
    total: int

    @classmethod
    def all(cls, total: int) -> Rows:
        """All rows of a run in one process."""
        return cls(0, total, total)

    @property
    def size(self) -> int:
        """How many are here."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """These rows of a tensor of all rows."""
        return slice(self.start, self.stop)
