"""Experience of both kinds for one learner: each rollout as it comes, then some that were kept of those before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.cache import ExperienceCache, Unroll
from ludus.core.config import AgentConfig
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors
from ludus.experience.rollout import RolloutCache, block
from ludus.experience.space import free_room

ACCOUNT = 2 * 4 + 3  # bytes a step beside observation and action: reward and discount, two endings and real
NAMED = ("observation", "action", "experience", "final")  # the parts of a batch that are dicts
PLAIN = ("first", "reward", "terminated", "truncated", "discount", "real")


@dataclass(frozen=True)
class UnrollConfig(AgentConfig):
    """Settings of agents that learn from fresh and replayed rollouts."""

    rollout: int = 20  # steps per environment between two updates, and of what is replayed: longer sees further
    replay: int = 50_000  # transitions kept, over all environments; more: older experience, more memory
    replay_ratio: float = 4.0  # updates from kept rollouts per update from a fresh one, on average; 0: none
    warmup: int = 1_000  # steps before the first update from kept rollouts
    save_replay: bool = True  # in checkpoints, for an exact resume; no: smaller ones, and a resume warms up anew

    def check_run_length(self, nb_step: int, rows: int) -> None:
        """Refuse a warm-up that is longer than the run."""
        if self.replay_ratio and self.warmup >= nb_step:
            raise UserError(
                f"agent.warmup is {self.warmup}, but nb_step is {nb_step}, so nothing would ever be replayed; lower "
                "agent.warmup, or raise nb_step."
            )


class UnrollCache(ExperienceCache):
    """A rollout that is being written, and a ring of whole ones ``[T+1, N·B, …]`` with their first hidden states.

    It is ready when a rollout is full, and then again as often as a Poisson variable with mean ``replay_ratio`` says
    (Wang et al. 2017, algorithm 1). Such a read picks B columns from all that is kept, each with equal chance, so that
    both kinds of batch look the same; ``index`` tells a replayed one. Groups of rows write lanes, as in RolloutCache.
    """

    def __init__(
        self,
        config: UnrollConfig,
        batch: int,
        gamma: float,
        observation: Specs,
        device: torch.device,
        keeps_return: bool = False,
    ) -> None:
        self.config, self.batch, self.device = config, batch, device
        self.capacity = config.replay // (config.rollout * batch) if config.replay_ratio else 0  # rollouts
        self.bytes = bytes_needed(self.capacity * batch, config.rollout, observation)
        if self.bytes > (free := free_room(device, "")):
            raise UserError(
                f"agent.replay needs {self.bytes / 1e9:,.2f} GB of memory, of which {free / 1e9:,.2f} GB are free; "
                "lower agent.replay."
            )
        self.generator: torch.Generator = (
            torch.Generator()
        )  # of what is replayed, and how often; the container seeds it
        self._open = RolloutCache(config.rollout, batch, gamma, device, keeps_return)
        self._ring: Tensors = {}
        self._states = HiddenState()  # [N·B, …]
        self._written = 0  # rollouts since the start; in the ring are the last of them
        self._steps = 0  # real ones among them
        self._owed = 0  # reads of kept rollouts before it is time to step again
        self._fresh, self._replayed = 0, 0  # reads since the end of warm-up

    @property
    def kept(self) -> int:
        """The number of rollouts in the ring."""
        return min(self._written, self.capacity)

    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        """As a rollout does."""
        self._open.env_write(step, state, start, final_value)

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """As a rollout does."""
        self._open.agent_write(step, start)

    def ready(self) -> bool:
        """Whether a rollout is full and has not been read, or a replay is owed."""
        return self._owed > 0 or self._open.ready()

    def accepts(self, start: int) -> bool:
        """Whether these rows have less than T steps."""
        return self._open.accepts(start)

    def read(self) -> Batch:
        """The fresh rollout if there is one, as views; else one made of kept columns."""
        if not self._open.ready():
            self._owed -= 1
            return self._replay()
        batch = self._open.read()
        if self.capacity:
            self._keep(batch)
        return batch

    def _keep(self, batch: Batch) -> None:
        """Copy a rollout into the ring, in place of the oldest, and draw how many kept ones follow it."""
        tensors = _tensors(batch)
        if not self._ring:
            self._allocate(tensors, batch.state)
        start = self._written % self.capacity * self.batch
        for name, x in tensors.items():
            self._ring[name][:, start : start + self.batch].copy_(x)
        for name, x in batch.state.items():
            self._states[name][start : start + self.batch].copy_(x)
        self._written += 1
        self._steps += int(batch.real.sum())
        if self._steps >= self.config.warmup:
            self._owed = int(torch.poisson(torch.tensor(self.config.replay_ratio), self.generator))
            self._fresh, self._replayed = self._fresh + 1, self._replayed + self._owed

    def _replay(self) -> Batch:
        index = torch.randint(self.kept * self.batch, (self.batch,), generator=self.generator).to(self.device)
        tensors = {name: _pick(x, index) for name, x in self._ring.items()}
        return _batch(tensors, self._states.rows(index), self._number(index))

    def _number(self, index: Tensor) -> Tensor:
        """The monotone write number of columns of the ring."""
        slot, row = index // self.batch, index % self.batch
        last = self._written - 1
        return (last - (last - slot) % self.capacity) * self.batch + row

    def receive(self, unroll: Unroll) -> None:
        """As a rollout does."""
        self._open.receive(unroll)

    def amend(self, step: EnvStep) -> None:
        """Write the last observation of every row again; kept rollouts ended with the true one, and keep it."""
        self._open.amend(step)

    def metrics(self) -> dict[str, float]:
        """Transitions that are kept, and updates from them per update from a fresh rollout, since warm-up."""
        size = float(self.kept * self.config.rollout * self.batch)
        return {"replay/size": size, "replay/ratio": self._replayed / max(self._fresh, 1)}

    def state_dict(self) -> State:
        """The open rollout, the ring as far as it is filled, the generator and the counters."""
        saves = self.config.save_replay
        columns = self.kept * self.batch if saves else 0
        return {
            "open": self._open.state_dict(),
            "generator": self.generator.get_state(),
            "ring": {name: x[:, :columns] for name, x in self._ring.items()} if saves else {},
            "states": {name: x[:columns] for name, x in self._states.items()} if saves else {},
            "counts": [self._written, self._steps, self._owed, self._fresh, self._replayed] if saves else [0] * 5,
        }

    def load_state_dict(self, state: State) -> None:
        """Take over all of it."""
        self._open.load_state_dict(state["open"])
        self.generator.set_state(state["generator"])
        self._ring, self._states = {}, HiddenState()
        if state["ring"]:
            self._allocate(state["ring"], state["states"])
        for name, x in state["ring"].items():
            self._ring[name][:, : x.shape[1]].copy_(x)
        for name, x in state["states"].items():
            self._states[name][: len(x)].copy_(x)
        self._written, self._steps, self._owed, self._fresh, self._replayed = state["counts"]

    def _allocate(self, like: Tensors, states: Tensors) -> None:
        columns = self.capacity * self.batch
        self._ring = {name: block(len(x), columns, x[0], self.device) for name, x in like.items()}
        self._states = HiddenState(
            {name: torch.zeros(columns, *x.shape[1:], dtype=x.dtype, device=self.device) for name, x in states.items()}
        )


def bytes_needed(columns: int, length: int, observation: Specs) -> int:
    """Bytes of so many rollouts of one environment each; what an agent notes, and hidden states, come on top."""
    seen = sum(spec.size * np.dtype(spec.dtype).itemsize for spec in observation.values())
    return columns * ((length + 1) * (seen + 1) + length * ACCOUNT)


def _tensors(batch: Batch) -> Tensors:
    """All ``[T, B, …]`` and ``[T+1, B, …]`` tensors of a batch by place and name."""
    named = {f"{kind}/{name}": x for kind in NAMED for name, x in getattr(batch, kind).items()}
    return named | {name: getattr(batch, name) for name in PLAIN}


def _batch(tensors: Tensors, state: HiddenState, index: Tensor) -> Batch:
    """Undo ``_tensors``."""
    named: dict[str, Tensors] = {kind: {} for kind in NAMED}
    for place, x in tensors.items():
        kind, slash, name = place.partition("/")
        if slash:
            named[kind][name] = x
    plain = {name: tensors[name] for name in PLAIN}
    weight = torch.ones_like(plain["reward"])
    return Batch(**named, **plain, weight=weight, state=state, index=index)  # type: ignore[arg-type]


def _pick(x: Tensor, columns: Tensor) -> Tensor:
    """``x[:, columns]``; images that lie channels-last in memory stay so."""
    if x.dim() == 5 and not x.is_contiguous():
        return x.movedim(2, -1).index_select(1, columns).movedim(-1, 2)
    return x.index_select(1, columns)
