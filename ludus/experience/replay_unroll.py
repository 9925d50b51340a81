"""Steps that a worker sends to a learner's replay, with the TD errors of the items that they complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.cache import Unroll
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors
from ludus.experience.replay import NOTHING, ExperienceReplay
from ludus.experience.rollout_unroll import RolloutUnroll

TD_ERROR = "td_error"


class LastItems(ExperienceReplay):
    """A small replay of a worker's last steps, from which the items that they complete are read."""

    def completed(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of the items that the last ``steps`` steps completed, and by which of these steps each."""
        numbers, at = [NOTHING], [NOTHING]
        for group in self._groups.values():
            low = group.time + 1 - steps - self.config.span  # the earliest start of such an item
            new = group.numbers[group.numbers >= low * self.batch]
            numbers.append(new)
            at.append(new // self.batch - low)
        return torch.from_numpy(np.concatenate(numbers)), torch.from_numpy(np.concatenate(at))

    def read_items(self, numbers: Tensor) -> Batch:
        """Return a batch that begins with these items; it has ``config.batch_size`` of them."""
        size = self.config.batch_size
        return self._reader.read(numbers.repeat(-(-size // len(numbers)))[:size], None, self.generator)


class ReplayUnroll(RolloutUnroll):
    """A rollout that also has, for each step, the |δ| of the item (transition or sequence) that it completes.

    These are read from ``items``, and ``td_error`` computes the |δ| ``[M]`` of a batch of them; without ``items`` there
    are none.
    """

    def __init__(
        self,
        length: int,
        rows: Rows,
        device: torch.device,
        memory: Tensors | None = None,
        items: LastItems | None = None,
        td_error: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        super().__init__(length, rows, 1.0, device, memory=memory)
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
            found = self._td_error(self._items.read_items(numbers))[: len(numbers)]
            errors[steps, numbers % self.batch] = found.float().cpu()
        return errors

    def schedule(self, progress: float) -> None:
        super().schedule(progress)
        if self._items is not None:
            self._items.schedule(progress)

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
