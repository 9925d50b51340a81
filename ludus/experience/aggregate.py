"""DAgger's cache: rollouts, and a growing set of labelled steps to draw batches from."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.dataset import Dataset
from ludus.core.errors import UserError
from ludus.core.types import State, Tensors
from ludus.experience.memory import check_fits, free_bytes
from ludus.experience.recorded import make_batch, recorded_steps, recorded_stream
from ludus.experience.rollout import RolloutCache, select_prefix
from ludus.experience.sequences import SequenceShape, draw_sequences
from ludus.preprocess.action_inverter import ActionInverter

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
        return self._kept

    @property
    def _kept(self) -> int:
        """The length of the ring."""
        return min(self._written, self.capacity)

    def add_dataset(self, dataset: Dataset, inverter: ActionInverter) -> None:
        """Add recorded steps."""
        self._add(_by_kind(*recorded_steps(dataset, inverter, self.device)))

    def _labelled(self, rollout: Batch, label: Tensors) -> Tensors:
        """Return the steps of a rollout to add."""
        real = rollout.real
        observation = {name: x[:-1][real] for name, x in rollout.observation.items()}
        return _by_kind(observation, {name: x[real] for name, x in label.items()})

    def _draw(self) -> Batch:
        """Return a batch of labelled steps."""
        index = torch.randint(self._kept, (self.batch_size,), generator=self.generator).to(self.device)
        drawn = {name: x[index] for name, x in self._steps.items()}
        return make_batch(select_prefix(drawn, "observation"), select_prefix(drawn, "action"), {}, index, {})

    def _add(self, steps: Tensors) -> None:
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
            self._add(self._labelled(batch, select_prefix(batch.experience, LABEL[:-1])))
            self._due = self.updates
            return batch
        self._due -= 1
        return self._draw()

    def metrics(self) -> dict[str, float]:
        """Return the number of labelled steps."""
        return {"labelled_steps": float(self.size)}

    def state_dict(self) -> State:
        """Return the unfinished rollout, the labelled steps and the state of sampling."""
        return {
            "rollout": super().state_dict(),
            "steps": {name: x[: self._kept] for name, x in self._steps.items()},
            "generator": self.generator.get_state(),
            "counters": [self._written, self._due],
        }

    def load_state_dict(self, state: State) -> None:
        """Load what ``state_dict`` returned."""
        super().load_state_dict(state["rollout"])
        self._steps = {name: x.to(self.device) for name, x in state["steps"].items()}
        self.generator.set_state(state["generator"])
        self._written, self._due = state["counters"]


class AggregateSequences(AggregateCache):
    """The same for recurrent networks: whole rollouts are kept, and batches are sequences (``draw_sequences``).

    A row of the ring is one step of all environments, ``[B, …]``, padding included; rollouts follow each other.
    """

    def __init__(
        self,
        rollout: int,
        batch: int,
        gamma: float,
        device: torch.device,
        with_returns: bool,
        capacity: int,
        updates: int,
        shape: SequenceShape,
        step_bytes: int,
    ) -> None:
        if capacity < batch * shape.span:
            raise UserError(
                f"agent.labels is {capacity}, too few for a sequence of {shape.span} steps (agent.burn_in + "
                f"agent.sequence) of each of {batch} environments; raise it to {batch * shape.span} or more."
            )
        batch_size = shape.columns * shape.steps
        super().__init__(rollout, batch, gamma, device, with_returns, capacity, updates, batch_size, step_bytes)
        self.shape, self.capacity = shape, capacity // batch

    @property
    def size(self) -> int:
        """The number of labelled steps."""
        return int(self._steps["real"][: self._kept].sum()) if self._steps else 0

    def add_dataset(self, dataset: Dataset, inverter: ActionInverter) -> None:
        """Add recorded episodes, as if the environments had played them: each has an equal part of all steps."""
        stream = recorded_stream(dataset, inverter, self.device)
        each = -(-len(stream["real"]) // self.batch)
        parts = {}
        for name, x in stream.items():
            padding = x[-1:].expand(each * self.batch - len(x), *x.shape[1:])  # the last step is not real
            parts[name] = torch.cat([x, padding]).view(self.batch, each, *x.shape[2:]).transpose(0, 1)
        self._add(parts)

    def _labelled(self, rollout: Batch, label: Tensors) -> Tensors:
        flags = {name: getattr(rollout, name) for name in ("real", "reward", "terminated", "truncated")}
        steps = _by_kind({name: x[:-1] for name, x in rollout.observation.items()}, label)
        return steps | flags | {"first": rollout.first[:-1]}

    def _draw(self) -> Batch:
        steps, oldest = {name: x[: self._kept] for name, x in self._steps.items()}, self._written % self._kept
        return draw_sequences(steps, oldest, self.shape, self.gamma, self.generator)


def _by_kind(observation: Tensors, action: Tensors) -> Tensors:
    """Return both with prefixed names."""
    steps = {f"observation/{name}": x for name, x in observation.items()}
    return steps | {f"action/{name}": x for name, x in action.items()}
