"""Rollouts of agents that compute the rewards themselves."""

from __future__ import annotations

from dataclasses import replace

import torch

from ludus.core.batch import Batch
from ludus.core.types import State
from ludus.experience.rollout import RolloutCache

CARRIED = "carried"  # in the row_state of batches


class CarryingRollout(RolloutCache):
    """A rollout for agents that compute the rewards themselves, and so each row's running return.

    ``row_state["carried"]`` ``[B]`` is γR before the first step, which ``learn`` overwrites by that after the last one;
    0 in unrolls of workers, of which some may be missing.
    """

    def __init__(self, length: int, batch: int, gamma: float, device: torch.device) -> None:
        super().__init__(length, batch, gamma, device)
        self.carried = torch.zeros(batch, dtype=torch.float64, device=device)

    def read(self) -> Batch:
        batch = super().read()
        carried = self.carried if self.versions is None else torch.zeros_like(self.carried[: self.columns])
        return replace(batch, row_state={CARRIED: carried})

    def state_dict(self) -> State:
        return super().state_dict() | {CARRIED: self.carried}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.carried.copy_(state[CARRIED])
