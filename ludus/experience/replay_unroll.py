"""Steps that a worker sends to a learner's replay, with the TD errors of the items that they complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.cache import Unroll
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors
from ludus.experience.replay import ExperienceReplay
from ludus.experience.rollout import RolloutCache

TD_ERROR = "td_error"


class ReplayUnroll(RolloutCache):
    """A rollout that also has, for each step, the |δ| of the item (transition or sequence) that it completes.

    ``items`` is a small replay of the last steps, from which these items are read, and ``td_error`` computes the |δ|
    ``[M]`` of a batch of them; without ``items`` there are none.
    """

    def __init__(
        self,
        length: int,
        rows: Rows,
        device: torch.device,
        memory: Tensors | None = None,
        items: ExperienceReplay | None = None,
        td_error: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        super().__init__(length, rows.size, 1.0, device, rows=rows, memory=memory)
        self._items, self._td_error = items, td_error

    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        super().env_write(step, state, start, final_value)
        if self._items is not None:
            self._items.env_write(step, state, start)

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        super().agent_write(step, start)
        if self._items is not None:
            self._items.agent_write(step, start)

    def submit(self) -> Unroll:
        """Return the unroll with the TD errors."""
        unroll = super().submit()
        if self._items is not None:
            errors = self._errors()
            unroll.tensors[TD_ERROR] = self.memory[TD_ERROR].copy_(errors) if self.memory else errors
        return unroll

    def _errors(self) -> Tensor:
        """Return the |δ| of the item that each step completes ``[T, B]``; NaN where there is none."""
        assert self._items is not None
        assert self._td_error is not None
        errors = torch.full((self.length, self.batch), torch.nan)
        numbers, steps = self._items.completed(self.length)
        if len(numbers):
            padded = numbers.repeat(-(-self._items.config.batch_size // len(numbers)))[: self._items.config.batch_size]
            found = self._td_error(self._items.read_items(padded))[: len(numbers)]
            errors[steps, numbers % self.batch] = found.float().cpu()
        return errors

    def continue_from(self, last: Self) -> None:
        super().continue_from(last)
        self._items = last._items

    def outline(self, rows: int) -> Tensors:
        tensors = super().outline(rows)
        if self._items is not None:
            tensors[TD_ERROR] = torch.zeros(self.length, rows, device="meta")
        return tensors

    def amend(self, step: EnvStep) -> None:
        super().amend(step)
        if self._items is not None:
            self._items.amend(step)

    def state_dict(self) -> State:
        return {"rollout": super().state_dict(), "items": None if self._items is None else self._items.state_dict()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state["rollout"])
        if self._items is not None:
            self._items.load_state_dict(state["items"])
