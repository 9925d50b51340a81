"""Statistics of the running episodes of a range of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.step import Episode
from ludus.environments.rows import StepArrays
from ludus.environments.spaces import Arrays
from ludus.managers.history import ActionHistory

SAVED = ("total", "length", "episode", "ended")  # attributes in checkpoints
RowInfos = Callable[[int], dict[str, float]]  # numeric infos by row


class EpisodeStats:
    """Returns, lengths and numbers of the running episodes, and the actions since their resets.

    ``memory`` is the last step of these rows; ``start`` is the number of the first of them in the batch.
    """

    def __init__(self, memory: StepArrays, start: int, history: ActionHistory | None) -> None:
        rows = len(memory.reward)
        self.memory, self.start, self.history = memory, start, history
        self.total = np.zeros(rows, np.float64)
        self.length = np.zeros(rows, np.int64)
        self.episode = np.zeros(rows, np.int64)
        self.ended = np.zeros(rows, np.bool_)

    def reset(self) -> None:
        """Start the first episode of every row."""
        self.episode[:] = -1
        self.start_next(slice(None))

    def load(self, saved: Arrays, actions: list[Arrays | None]) -> None:
        """Load the arrays named in SAVED, and the actions of each row."""
        for name in SAVED:
            getattr(self, name)[:] = saved[name]
        if self.history is not None:
            self.history.load(actions)

    def start_next(self, rows: slice | int | NDArray[np.bool_]) -> None:
        """Start the next episodes of some rows."""
        self.total[rows], self.length[rows], self.ended[rows] = 0, 0, False
        self.episode[rows] += 1
        if self.history is not None:
            self.history.start(rows)

    def add(self, reward: NDArray[Any], infos: RowInfos) -> list[Episode]:
        """Add the step in memory and return the episodes that it ended; ``reward`` is summed to returns."""
        memory = self.memory
        np.add(self.total, reward, self.total)
        self.length += 1
        if 1 in memory.first.tobytes():  # much faster than any()
            self.start_next(memory.first)
        np.logical_or(memory.terminated, memory.truncated, self.ended)
        finished = []
        for i in self.ended.nonzero()[0].tolist():
            row, seed = self.start + i, int(memory.seed[i])
            known = None if seed < 0 else seed
            finished.append(Episode(row, float(self.total[i]), int(self.length[i]), known, infos(row)))
        return finished
