"""Random numbers for acting."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
        self._steps: list[Tensors] = []
        self._start = generator.get_state()

    def next(self) -> Tensors:
        """Return the numbers for one step, ``[B, …]`` by name."""
        if not self._steps:
            self._refill()
        return self._steps.pop()

    def _refill(self) -> None:
        self._start = self.generator.get_state()
        drawn = self._draw(self._chunk, self.generator)
        if self._rows.size < self._rows.total:
            drawn = {name: x[:, self._rows.slice] for name, x in drawn.items()}
        steps = zip(*(x.unbind() for x in drawn.values()), strict=True)
        self._steps = (
            [dict(zip(drawn, step, strict=True)) for step in steps] if drawn else [{} for _ in range(self._chunk)]
        )

    def state_dict(self) -> State:
        """Return the generator's state before the current chunk, and how many steps of the chunk are left."""
        return {"generator": self._start if self._steps else self.generator.get_state(), "left": len(self._steps)}

    def load_state_dict(self, state: State) -> None:
        """Draw the current chunk again and drop the steps that were used."""
        self.generator.set_state(state["generator"])
        self._start, self._steps = state["generator"], []
        if state["left"]:
            self._refill()
            del self._steps[state["left"] :]
