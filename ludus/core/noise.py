"""Random numbers for acting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ludus.core.rows import Rows
from ludus.core.types import State, Tensors


class Noise:
    """Random numbers for acting, drawn for ``chunk`` steps at a time.

    ``draw`` returns numbers for all rows of a run ``[steps, total, …]``, from which ``rows`` are selected, so a row
    gets the same numbers whichever process it is in.
    """

    def __init__(
        self,
        draw: Callable[[int, torch.Generator], Tensors],
        generator: torch.Generator,
        rows: Rows,
        chunk: int = 128,
    ) -> None:
        self._draw, self.generator, self._rows, self._chunk = draw, generator, rows, chunk
        self._start = generator.get_state()
        self._drawn: dict[str, tuple[Tensor, ...]] = {}  # the current chunk by name and step
        self._left = 0  # steps of it that were not used; they are used from the last to the first

    def next(self) -> Tensors:
        """Return the numbers for one step, ``[B, …]`` by name."""
        if self._left == 0:
            self._refill()
        self._left -= 1
        return {name: steps[self._left] for name, steps in self._drawn.items()}

    def _refill(self) -> None:
        self._start, self._left = self.generator.get_state(), self._chunk
        for name, x in self._draw(self._chunk, self.generator).items():
            self._drawn[name] = x[:, self._rows.start : self._rows.stop].unbind()

    def state_dict(self) -> State:
        """Return the generator's state before the current chunk, and how many steps of the chunk are left."""
        return {"generator": self._start if self._left else self.generator.get_state(), "left": self._left}

    def load_state_dict(self, state: State) -> None:
        """Draw the current chunk again and drop the steps that were used."""
        self.generator.set_state(state["generator"])
        self._left = state["left"]
        if self._left:
            self._refill()
            self._left = state["left"]
