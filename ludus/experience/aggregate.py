"""DAgger's cache: rollouts, and a growing set of labelled steps to draw batches from."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.dataset import Dataset
from ludus.core.types import State, Tensors
from ludus.experience.memory import check_fits, free_bytes
from ludus.experience.recorded import make_batch, recorded_steps
from ludus.experience.rollout import RolloutCache, select_prefix
from ludus.preprocess.actions import ActionInverter

LABEL = "label/"  # prefix of the teacher's actions in the experience of a rollout


class AggregateCache(RolloutCache):
    """A rollout that is being written, and the labelled steps of all rollouts so far, of which the oldest are dropped.

    It is ready when a rollout is full, and then again for ``updates`` batches ``[1, N]`` of labelled steps, whose
    actions are the labels; those have an ``index``.
    """

    partial = False

    def __init__(
        self,
        rollout: int,
        batch: int,
        gamma: float,
        device: torch.device,
        with_returns: bool,
        capacity: int,
        updates: int,
        batch_size: int,
        step_bytes: int,
    ) -> None:
        super().__init__(rollout, batch, gamma, device, with_returns)
        self.capacity, self.updates, self.batch_size = capacity, updates, batch_size
        self.bytes = capacity * step_bytes  # at most
        check_fits("agent.labels needs", self.bytes, free_bytes(device, ""), "lower agent.labels")
        self.generator: torch.Generator = torch.Generator()
        self._written = 0  # labelled steps so far
        self._steps: Tensors = {}  # observation/… and action/… [n, …], a ring once n is the capacity
        self._due = 0  # batches to read before stepping again

    @property
    def size(self) -> int:
        """The number of labelled steps."""
        return min(self._written, self.capacity)

    def add_dataset(self, dataset: Dataset, inverter: ActionInverter) -> None:
        """Add recorded steps."""
        self._add(*recorded_steps(dataset, inverter, self.device))

    def _add(self, observation: Tensors, action: Tensors) -> None:
        steps = {f"observation/{name}": x for name, x in observation.items()}
        steps |= {f"action/{name}": x for name, x in action.items()}
        count = len(next(iter(steps.values())))
        place = (self._written + torch.arange(count, device=self.device)) % self.capacity
        for name, x in steps.items():
            self._steps[name] = self._with_room(self._steps.get(name), x, self._written + count)
            self._steps[name].index_copy_(0, place[-self.capacity :], x[-self.capacity :])
        self._written += count

    def _with_room(self, column: Tensor | None, like: Tensor, needed: int) -> Tensor:
        """Return the column, or a copy with twice its length where it has no room for ``needed`` steps."""
        old = 0 if column is None else len(column)
        if column is not None and old >= min(needed, self.capacity):
            return column
        length = min(max(2 * old, needed), self.capacity)
        larger = torch.zeros((length, *like.shape[1:]), dtype=like.dtype, device=self.device)
        if column is not None:
            larger[:old].copy_(column)
        return larger

    def ready(self) -> bool:
        """Whether there is an unread full rollout, or a batch is due."""
        return self._due > 0 or super().ready()

    def read(self) -> Batch:
        """Return the full rollout, if it has not been read, else a batch of labelled steps."""
        if super().ready():
            batch = super().read()
            real, labels = batch.real, select_prefix(batch.experience, LABEL[:-1])
            self._add({k: x[:-1][real] for k, x in batch.observation.items()}, {k: x[real] for k, x in labels.items()})
            self._due = self.updates
            return batch
        self._due -= 1
        index = torch.randint(self.size, (self.batch_size,), generator=self.generator).to(self.device)
        drawn = {name: x[index] for name, x in self._steps.items()}
        return make_batch(select_prefix(drawn, "observation"), select_prefix(drawn, "action"), {}, index, {})

    def metrics(self) -> dict[str, float]:
        """Return the number of labelled steps."""
        return {"labelled_steps": float(self.size)}

    def state_dict(self) -> State:
        """Return the unfinished rollout, the labelled steps and the state of sampling."""
        return {
            "rollout": super().state_dict(),
            "steps": {name: x[: self.size] for name, x in self._steps.items()},
            "generator": self.generator.get_state(),
            "counters": [self._written, self._due],
        }

    def load_state_dict(self, state: State) -> None:
        """Load what ``state_dict`` returned."""
        super().load_state_dict(state["rollout"])
        self._steps = {name: x.to(self.device) for name, x in state["steps"].items()}
        self.generator.set_state(state["generator"])
        self._written, self._due = state["counters"]
