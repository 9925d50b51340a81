"""On-policy experience: the last T steps of B environments."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.agent import ExperienceCache
from ludus.core.types import AgentStep, Batch, EnvStep, HiddenState, State, Tensors

Rows = dict[str, list[Tensor]]  # a tensor's views by time step, made once: indexing costs more than the copy


class RolloutCache(ExperienceCache):
    """A preallocated block ``[T+1, B, …]`` per tensor; each tensor is copied into it once.

    Row T of one rollout is row 0 of the next: the agent acts on that observation only after it has learned.
    """

    def __init__(self, length: int, batch: int, gamma: float, device: torch.device) -> None:
        self.length, self.batch, self.gamma, self.device = length, batch, gamma, device
        self._cursor = -1  # the row of the last observation; -1 before the first
        self._consumed = False
        self._acted = False  # whether the blocks for what the agent says are there
        self._blocks: dict[str, Tensor] = {}
        self._rows: Rows = {}
        self._observation_rows: list[list[Tensor]] = []
        self._said_rows: list[list[Tensor]] = []
        self._state, self._last_state = HiddenState(), HiddenState()

    def env_write(self, step: EnvStep, state: HiddenState) -> None:
        """Write observation and ``first`` at the next row, reward and endings at the one before."""
        if not self._blocks:
            self._allocate(
                {f"observation/{k}": x for k, x in step.observation.items()} | {"first": step.first}, self.length + 1
            )
            self._allocate({k: getattr(step, k) for k in ("reward", "terminated", "truncated")}, self.length)
        self._cursor += 1
        at, rows = self._cursor, self._rows
        for target, x in zip(self._observation_rows, step.observation.values(), strict=True):
            target[at].copy_(x)
        rows["first"][at].copy_(step.first)
        if at == 0:
            self._state = state.map(torch.clone)
            return
        rows["reward"][at - 1].copy_(step.reward)
        rows["terminated"][at - 1].copy_(step.terminated)
        rows["truncated"][at - 1].copy_(step.truncated)
        if at == self.length:
            self._last_state = state.map(torch.clone)  # acting's own are inference tensors

    def agent_write(self, step: AgentStep) -> None:
        """Write action and experience at the row of the last observation."""
        if self._cursor == self.length:
            self._carry()
        if not self._acted:
            self._acted = True
            self._allocate({f"action/{k}": x for k, x in step.action.items()}, self.length)
            self._allocate({f"experience/{k}": x for k, x in step.experience.items()}, self.length)
        at = self._cursor
        for target, x in zip(self._said_rows, (*step.action.values(), *step.experience.values()), strict=True):
            target[at].copy_(x)

    def ready(self) -> bool:
        """Whether T steps are there and have not been read."""
        return self._cursor == self.length and not self._consumed

    def read(self) -> Batch:
        """The rollout, as views into the block."""
        self._consumed = True
        first, terminated = self._blocks["first"], self._blocks["terminated"]
        return Batch(
            observation=self._named("observation"),
            first=first,
            action=self._named("action"),
            reward=self._blocks["reward"],
            terminated=terminated,
            truncated=self._blocks["truncated"],
            discount=(~terminated).to(torch.float32).mul_(self.gamma),
            weight=(~first[1:]).to(torch.float32),
            experience=self._named("experience"),
            state=self._state,
            last_state=self._last_state,
        )

    def state_dict(self) -> State:
        """The open rollout; of one that was learned from, only the row that begins the next."""
        blocks = (
            {k: x[self.length :] for k, x in self._blocks.items() if _carried(k)} if self._consumed else self._blocks
        )
        return {
            "cursor": self._cursor,
            "consumed": self._consumed,
            "blocks": dict(blocks),
            "state": dict(self._state),
            "last_state": dict(self._last_state),
        }

    def load_state_dict(self, state: State) -> None:
        """Take over an open rollout."""
        self._cursor, self._consumed = state["cursor"], state["consumed"]
        here = lambda x: x.to(self.device)  # noqa: E731
        self._state, self._last_state = (
            HiddenState(state["state"]).map(here),
            HiddenState(state["last_state"]).map(here),
        )
        start = self.length if self._consumed else 0
        for name, x in state["blocks"].items():
            self._allocate({name: x[0]}, self.length + _carried(name))
            self._blocks[name][start : start + len(x)].copy_(x)
        if self._consumed:
            endings = {k: torch.zeros(self.batch, dtype=torch.bool) for k in ("terminated", "truncated")}
            self._allocate({"reward": torch.zeros(self.batch)} | endings, self.length)
        self._acted = any(k.startswith("action/") for k in self._blocks)

    def _allocate(self, like: Tensors, length: int) -> None:
        for name, x in like.items():
            self._blocks[name] = _block(length, x, self.device)
            self._rows[name] = list(self._blocks[name].unbind(0))
        self._index_rows()

    def _index_rows(self) -> None:
        """Lists in the order in which steps are written: looking names up at every step costs more than the copy."""
        self._observation_rows = [rows for name, rows in self._rows.items() if name.startswith("observation/")]
        self._said_rows = [
            rows for kind in ("action/", "experience/") for n, rows in self._rows.items() if n.startswith(kind)
        ]

    def _carry(self) -> None:
        for name, rows in self._rows.items():
            if _carried(name):
                rows[0].copy_(rows[self.length])
        self._state, self._cursor, self._consumed = self._last_state, 0, False

    def _named(self, kind: str) -> Tensors:
        return {k[len(kind) + 1 :]: x for k, x in self._blocks.items() if k.startswith(kind + "/")}


def _block(length: int, x: Tensor, device: torch.device) -> Tensor:
    """Zeros ``[length, *x.shape]``; images ``[B, C, H, W]`` lie channels-last, so that no update has to turn them."""
    if x.dim() == 4 and x.shape[1] < min(x.shape[2:]):
        batch, channels, height, width = x.shape
        return torch.zeros(length, batch, height, width, channels, dtype=x.dtype, device=device).movedim(-1, 2)
    return torch.zeros((length, *x.shape), dtype=x.dtype, device=device)


def _carried(name: str) -> bool:
    return name == "first" or name.startswith("observation/")
