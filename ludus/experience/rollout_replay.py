"""ACER's cache: fresh rollouts, then replayed ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from ludus.core.batch import Batch, select_columns
from ludus.core.config import AgentConfig, run_length
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.schedule import value_at
from ludus.core.spec import Specs
from ludus.core.types import State, Tensors
from ludus.core.updater import Updater
from ludus.experience.batch_tensors import to_batch, to_tensors
from ludus.experience.memory import check_fits, free_bytes, spec_bytes
from ludus.experience.rollout import RolloutCache, zeros_like_step

STEP_BYTES = 2 * 4 + 3  # per step beside observation and action: reward, discount and three flags
FLAGS = ("first", "terminated", "truncated", "real")
STORED = ("observation", "action", "experience", "final", "reward", "discount", *FLAGS)  # fields of a batch


@dataclass(frozen=True)
class RolloutReplayConfig(AgentConfig):
    """Settings of agents that learn from fresh and replayed rollouts."""

    SCHEDULABLE: ClassVar[tuple[str, ...]] = ("replay_ratio",)
    rollout: int = 20  # steps per environment between two updates, and of replayed rollouts: longer sees further
    replay: int = 50_000  # capacity in transitions, over all environments; more: older experience, more memory
    replay_ratio: float = 4.0  # updates from replayed rollouts per update from a fresh one, on average; 0: none
    warmup: int = 1_000  # steps before the first update from replayed rollouts
    save_replay: bool = True  # save it in checkpoints, for an exact resume; off: smaller, and a resume warms up again

    def for_rows(self, rows: Rows) -> Self:
        """Return the settings of a process that has some of the run's rows: its part of the replay and the warm-up."""
        part = self.replay * rows.size // rows.total
        if self.replay_ratio and part < self.rollout * rows.size:
            raise UserError(
                f"agent.replay is {self.replay}, less than one rollout of {self.rollout * rows.total} transitions "
                "(env.num × agent.rollout); raise it, or set agent.replay_ratio to 0."
            )
        return replace(self, replay=part, warmup=self.warmup * rows.size // rows.total)

    def check_run_length(self, nb_step: int, environments: int, agents: int = 1) -> None:
        """Refuse a warm-up that is longer than the run."""
        if self.replay_ratio and self.warmup >= nb_step * agents:
            raise UserError(
                f"agent.warmup is {self.warmup}, but {run_length(nb_step, agents)}, so nothing would ever be replayed; "
                "lower agent.warmup, or raise nb_step."
            )


class RolloutReplay(RolloutCache):
    """A rollout that is being written, and a ring buffer of past ones ``[T+1, N·B, …]`` with their initial states.

    It is ready when a rollout is full, and then again for a Poisson(``replay_ratio``) number of replayed batches (Wang
    et al. 2017, algorithm 1). A replayed batch has B columns drawn uniformly from all stored ones and an ``index``.
    """

    partial = False

    def __init__(
        self,
        config: RolloutReplayConfig,
        batch: int,
        gamma: float,
        observation: Specs,
        device: torch.device,
        with_returns: bool = False,
        ranks: int = 1,
    ) -> None:
        super().__init__(config.rollout, batch, gamma, device, with_returns)
        self.config = config
        self._ranks = ranks  # processes that learn together
        self.replay_ratio = config.replay_ratio
        self.capacity = config.replay // (config.rollout * batch) if config.replay_ratio else 0  # rollouts
        observed = sum(spec_bytes(spec) for spec in observation.values())
        columns = self.capacity * batch
        self.bytes = columns * ((config.rollout + 1) * (observed + 1) + config.rollout * STEP_BYTES)
        check_fits("agent.replay needs", self.bytes, free_bytes(device, ""), "lower agent.replay")
        # draws the number and the columns of replayed batches
        self.generator: torch.Generator = torch.Generator()
        self._ring: Tensors = {}
        self._states = HiddenState()  # [N·B, …]
        self._written = 0  # rollouts stored so far; the ring has the last of them
        self._steps = 0  # real steps in them
        self._due = 0  # replayed batches to read before stepping again
        self._agreed = False  # whether that is the same on all ranks
        self._fresh, self._replayed = 0, 0  # batches since the warm-up

    @property
    def stored(self) -> int:
        """The number of rollouts in the ring."""
        return min(self._written, self.capacity)

    def ready(self) -> bool:
        """Whether there is an unread full rollout, or a replayed batch is due."""
        return self._due > 0 or super().ready()

    def agree(self, updater: Updater) -> bool:
        """Average the number of replayed batches, which each rank draws, and return whether all ranks are ready.

        Rollouts are full on all ranks at the same time, and the average is the same on all until the next one.
        """
        if super().ready():
            return True
        if updater.ranks > 1 and not self._agreed:
            self._due = round(float(updater.mean(torch.tensor(float(self._due)))))
        self._agreed = self.ready()
        return self._agreed

    def read(self) -> Batch:
        """Return the full rollout, if it has not been read, else a replayed batch."""
        if super().ready():
            batch = super().read()
            if self.capacity:
                self._store(batch)
            return batch
        self._due -= 1
        columns = torch.randint(self.stored * self.batch, (self.batch,), generator=self.generator).to(self.device)
        tensors = {name: select_columns(x, columns) for name, x in self._ring.items()}
        slot, row = columns // self.batch, columns % self.batch
        last = self._written - 1
        number = (last - (last - slot) % self.capacity) * self.batch + row  # monotone write number
        weight = torch.ones_like(tensors["reward"])
        return to_batch(tensors, weight=weight, state=self._states.rows(columns), index=number)

    def _store(self, batch: Batch) -> None:
        """Copy a rollout over the oldest one in the ring, and draw the number of replayed batches that follow."""
        tensors = to_tensors(batch, STORED)
        if not self._ring:
            self._allocate_ring(tensors, batch.state)
        start = self._written % self.capacity * self.batch
        for name, x in tensors.items():
            self._ring[name][:, start : start + self.batch].copy_(x)
        for name, x in batch.state.items():
            self._states[name][start : start + self.batch].copy_(x)
        self._written += 1
        self._steps += int(batch.real.sum())
        if self._steps >= self.config.warmup:
            self._due = int(torch.poisson(torch.tensor(self.replay_ratio), self.generator))
            self._fresh, self._replayed = self._fresh + 1, self._replayed + self._due

    def schedule(self, progress: float) -> None:
        """Set the replay ratio and the discount, if they are schedules."""
        super().schedule(progress)
        self.replay_ratio = value_at(self.config.replay_ratio, progress)

    def metrics(self) -> dict[str, float]:
        """Return the transitions stored, and the replayed batches per fresh one since the warm-up."""
        size = float(self.stored * self.config.rollout * self.batch * self._ranks)
        return {"replay/size": size, "replay/ratio": self._replayed / max(self._fresh, 1)}

    def state_dict(self) -> State:
        """Return the unfinished rollout, the filled part of the ring, the generator and the counters."""
        saves = self.config.save_replay
        columns = self.stored * self.batch
        counters = [self._written, self._steps, self._due, self._fresh, self._replayed]
        return {
            "rollout": super().state_dict(),
            "generator": self.generator.get_state(),
            "ring": {name: x[:, :columns] for name, x in self._ring.items()} if saves else {},
            "states": {name: x[:columns] for name, x in self._states.items()} if saves else {},
            "counters": counters if saves else [0] * len(counters),
        }

    def load_state_dict(self, state: State) -> None:
        """Load what ``state_dict`` returned."""
        super().load_state_dict(state["rollout"])
        self.generator.set_state(state["generator"])
        self._ring, self._states = {}, HiddenState()
        if state["ring"]:
            self._allocate_ring(state["ring"], state["states"])
        for name, x in state["ring"].items():
            self._ring[name][:, : x.shape[1]].copy_(x)
        for name, x in state["states"].items():
            self._states[name][: len(x)].copy_(x)
        self._written, self._steps, self._due, self._fresh, self._replayed = state["counters"]

    def _allocate_ring(self, like: Tensors, states: Tensors) -> None:
        columns = self.capacity * self.batch
        self._ring = {name: zeros_like_step(x[0], len(x), columns, self.device) for name, x in like.items()}
        self._states = HiddenState(
            {name: torch.zeros(columns, *x.shape[1:], dtype=x.dtype, device=self.device) for name, x in states.items()}
        )
