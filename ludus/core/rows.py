"""The rows of a run that one process holds."""

from __future__ import annotations

from typing import NamedTuple


class Rows(NamedTuple):
    """Rows ``start`` to ``stop`` of the ``total`` rows of a run.

    Seeds, noise and everything else that differs by row depend on the row's number in the whole run, not on the
    process that holds it.
    """

    start: int
    stop: int
    total: int
    agents: int = 1  # rows of each environment, one after the other

    @classmethod
    def all(cls, total: int) -> Rows:
        """Return all rows of a run, for a single process."""
        return cls(0, total, total)

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    @classmethod
    def of_rank(cls, rank: int, ranks: int, total: int) -> Rows:
        """Return the rows of one of ``ranks`` processes, which have equally many."""
        return cls(rank * total // ranks, (rank + 1) * total // ranks, total)

    def times(self, agents: int) -> Rows:
        """Return the rows of these environments if each has so many agents."""
        return Rows(self.start * agents, self.stop * agents, self.total * agents, self.agents * agents)

    @property
    def slice(self) -> slice:
        """The index of these rows in a tensor of all rows."""
        return slice(self.start, self.stop)
