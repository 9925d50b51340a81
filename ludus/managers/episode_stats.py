"""The account of the running episodes of a range of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.step import Episode
from ludus.environments.rows import StepArrays
from ludus.environments.spaces import Arrays
from ludus.managers.history import History

COUNTED = ("total", "length", "episode", "ended")  # what is saved
Infos = Callable[[int], dict[str, float]]  # the numeric infos of a row


class EpisodeStats:
    """Returns, lengths and numbers of the running episodes, and the actions since their resets.

    ``memory`` is the step of these rows, the first of which has the number ``start`` in the batch.
    """

    def __init__(self, memory: StepArrays, start: int, history: History | None) -> None:
        rows = len(memory.reward)
        self.memory, self.start, self.history = memory, start, history
        self.total = np.zeros(rows, np.float64)
        self._steps, self._begun = 0, np.zeros(rows, np.int64)  # the number of the step, and that of each reset
        self.episode = np.zeros(rows, np.int64)
        self.ended = np.zeros(rows, np.bool_)
        self.any_ended = False

    @property
    def length(self) -> NDArray[np.int64]:
        """The steps of each running episode."""
        return self._steps - self._begun

    def begin(self) -> None:
        """Start with the first episodes."""
        self.episode[:] = -1
        self.begin_next(slice(None))
        self.any_ended = False

    def load(self, counted: Arrays, actions: list[Arrays | None]) -> None:
        """Take over what was saved: the arrays named in COUNTED, and the actions of each row."""
        self.total[:], self.episode[:], self.ended[:] = counted["total"], counted["episode"], counted["ended"]
        self._begun[:] = self._steps - counted["length"]
        self.any_ended = bool(self.ended.any())
        if self.history is not None:
            self.history.load(actions)

    def begin_next(self, rows: slice | int) -> None:
        """Start the next episodes of some rows, whatever became of the running ones."""
        self.total[rows], self._begun[rows], self.ended[rows] = 0, self._steps, False
        self.episode[rows] += 1
        if self.history is not None:
            self.history.begin(rows)

    def add(self, reward: NDArray[Any], infos: Infos | None) -> list[Episode]:
        """Add the step in memory; return the episodes that it ended. ``reward`` is what returns are made of."""
        memory = self.memory
        np.add(self.total, reward, self.total)
        self._steps += 1
        if 1 in memory.first.tobytes():  # a fifteenth of the time of any()
            begun = memory.first
            self.total[begun], self._begun[begun] = 0, self._steps
            self.episode[begun] += 1
            if self.history is not None:
                self.history.begin(begun)
        np.logical_or(memory.terminated, memory.truncated, self.ended)
        self.any_ended = 1 in self.ended.tobytes()
        return self._close(infos) if self.any_ended else []

    def _close(self, infos: Infos | None) -> list[Episode]:
        rows = self.ended.nonzero()[0]
        columns = ((rows + self.start), self.total[rows], self.length[rows], self.memory.seed[rows])
        ends = zip(*(column.tolist() for column in columns), strict=True)
        return [
            Episode(row, total, length, None if seed < 0 else seed, {} if infos is None else infos(row))
            for row, total, length, seed in ends
        ]
