"""Rollouts that a worker fills and submits to a learner."""

from __future__ import annotations

from typing import Self

import torch

from ludus.core.cache import Unroll, UnrollWriter
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.types import Tensors
from ludus.experience.rollout import RolloutCache, zeros_like_step


class RolloutUnroll(RolloutCache, UnrollWriter):
    """A rollout of some ``rows`` of a run, in ``memory`` if it is given: the tensors of an ``Unroll`` by name."""

    def __init__(
        self,
        length: int,
        rows: Rows,
        gamma: float,
        device: torch.device,
        with_returns: bool = False,
        memory: Tensors | None = None,
    ) -> None:
        super().__init__(length, rows.size, gamma, device, with_returns)
        self.rows, self.memory = rows, memory or {}

    def submit(self) -> Unroll:
        """Return the full rollout with its hidden states, in the memory given to the constructor."""
        if not self.ready():
            raise ValueError("an unroll was submitted before it was full")
        self.consumed = True
        tensors = dict(self.blocks)
        for kind in ("state", "last_state"):
            for name, x in HiddenState.concatenate([getattr(group, kind) for group in self.groups.values()]).items():
                key = f"{kind}/{name}"
                tensors[key] = self.memory[key].copy_(x) if key in self.memory else x
        return Unroll(tensors, self.rows, self.version)

    def continue_from(self, last: Self) -> None:
        """Start an unroll with the last observation of ``last``, which was submitted."""
        for name, x in last.blocks.items():
            self._allocate({name: x[0]}, len(x))
        for start, before in last.groups.items():
            group = self.groups.get(start) or self._add_group(start, before.rows.stop)
            torch._foreach_copy_(group.observation[0], before.observation[self.length])
            group.cursor, group.state, group.last_return = 0, before.last_state, before.last_return
        self.consumed = False

    def outline(self, rows: int) -> Tensors:
        """Return meta tensors like those of an unroll of ``rows`` rows, given one step of any number of rows."""
        meta = torch.device("meta")
        tensors = {name: zeros_like_step(x[0], len(x), rows, meta) for name, x in self.blocks.items()}
        (group,) = self.groups.values()
        if self.with_returns:
            tensors["row_state/return"] = torch.zeros(self.length, rows, dtype=group.last_return.dtype, device=meta)
        for kind in ("state", "last_state"):
            for name, x in group.state.items():
                tensors[f"{kind}/{name}"] = torch.zeros(rows, *x.shape[1:], dtype=x.dtype, device=meta)
        return tensors
