"""Rollout buffer: the last T steps of B environments, for on-policy agents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ludus.core.batch import NAMED, Batch
from ludus.core.cache import ExperienceCache, Unroll
from ludus.core.hidden_state import HiddenState
from ludus.core.schedule import value_at
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors
from ludus.core.updater import Updater
from ludus.ops.returns import running_returns

TRANSITION = ("reward", "terminated", "truncated", "real")
FINAL_VALUE = "experience/final_value"  # written by env_write, unlike the rest of the experience


class RolloutGroup:
    """Rows that step together, with views of each time step: indexing the blocks would cost more than copying."""

    def __init__(self, rows: slice, device: torch.device) -> None:
        self.rows, self.size = rows, rows.stop - rows.start
        self.cursor = -1  # time step of the last observation; -1 before the first
        self.state, self.last_state = HiddenState(), HiddenState()  # at the first and at the last time step
        self.last_return = torch.zeros(self.size, dtype=torch.float64, device=device)
        # what is written in one call, by time step; the last two are known at their first write
        self.observation, self.transition, self.agent, self.final = (list[list[Tensor]]() for _ in range(4))

    def views(self, blocks: Tensors, names: Iterable[str]) -> list[list[Tensor]]:
        """Return these rows of some blocks by time step."""
        return [list(step) for step in zip(*[blocks[name][:, self.rows].unbind() for name in names], strict=True)]


class RolloutCache(ExperienceCache):
    """Preallocated blocks ``[T+1, B, …]`` or ``[T, B, …]``, one per tensor.

    The observation at T is also the first of the next rollout: the agent acts on it after learning. Groups of
    environments that step independently write their own rows, each at its own time step. ``gamma`` may be a schedule.
    """

    partial = True

    def __init__(self, length: int, batch: int, gamma: float, device: torch.device, with_returns: bool = False) -> None:
        self.memory: Tensors = {}  # blocks to use instead of allocating them
        self.versions: Tensor | None = None  # [B] version of the weights that acted, for received unrolls
        self.with_returns = with_returns  # whether batches contain each row's running return (Batch.row_state)
        self.length, self.batch, self.device = length, batch, device
        self._given_gamma, self.gamma = gamma, value_at(gamma, 0.0)
        self.columns = batch  # of the batch that is filled; fewer after ``finish``
        self.consumed = False
        self.blocks: Tensors = {}
        self.groups: dict[int, RolloutGroup] = {}  # by first row

    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        """Write the observation and ``first`` at the next time step, and the transition that led to it."""
        group = self.groups.get(start)
        if group is None:
            observation = {f"observation/{name}": x for name, x in step.observation.items()}
            self._allocate(observation | {"first": step.first}, self.length + 1)
            self._allocate({name: getattr(step, name) for name in TRANSITION}, self.length)
            group = self._add_group(start, start + len(step.first))
        group.cursor += 1
        time = group.cursor
        torch._foreach_copy_(group.observation[time], [*step.observation.values(), step.first])
        if time == 0:
            group.state = state.map(torch.clone)
            return
        torch._foreach_copy_(group.transition[time - 1], [step.reward, step.terminated, step.truncated, step.real])
        if step.final is not None:  # last observations of episodes, or their values if a recurrent critic computed them
            last = {f"final/{name}": x for name, x in step.final.items()}
            last = last if final_value is None else {FINAL_VALUE: final_value}
            if not group.final:
                self._allocate(last, self.length)
                group.final = group.views(self.blocks, last)
            torch._foreach_copy_(group.final[time - 1], list(last.values()))
        if time == self.length:
            group.last_state = state.map(torch.clone)  # the state given is an inference tensor
            if self.with_returns:
                reward, terminated, truncated, real = (self.blocks[name][:, group.rows] for name in TRANSITION)
                ended = terminated | truncated
                returns, group.last_return = running_returns(reward, ended, real, self.gamma, group.last_return)
                self._allocate({"row_state/return": returns[0]}, self.length)
                self.blocks["row_state/return"][:, group.rows].copy_(returns)

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """Write action and experience at the time step of the last observation."""
        group = self.groups[start]
        if group.cursor == self.length:  # start the next rollout with the last observation
            torch._foreach_copy_(group.observation[0], group.observation[self.length])
            group.state, group.cursor, self.consumed = group.last_state, 0, False
        if not group.agent:
            like = {f"action/{name}": x for name, x in step.action.items()}
            like |= {f"experience/{name}": x for name, x in step.experience.items()}
            self._allocate(like, self.length)
            group.agent = group.views(self.blocks, like)
        torch._foreach_copy_(group.agent[group.cursor], [*step.action.values(), *step.experience.values()])

    def ready(self) -> bool:
        """Whether all rows have T steps that have not been read."""
        full = sum([group.size for group in self.groups.values() if group.cursor == self.length])
        return full == self.columns and not self.consumed

    def agree(self, updater: Updater) -> bool:
        """Return whether it is ready: ranks take the same number of steps, so their rollouts are full together."""
        return self.ready()

    def accepts(self, start: int) -> bool:
        """Whether these rows have fewer than T steps."""
        return self.groups[start].cursor < self.length

    def read(self) -> Batch:
        """Return the rollout as views into the blocks."""
        self.consumed = True
        blocks = self.blocks
        if self.columns < self.batch:
            blocks = {name: x[:, : self.columns] for name, x in blocks.items()}
        given: dict[str, Any] = {name: blocks[name] for name in ("first", *TRANSITION)}
        given |= {kind: select_prefix(blocks, kind) for kind in (*NAMED, "final", "row_state")}
        return Batch(
            **given,
            discount=(~blocks["terminated"]).to(torch.float32).mul_(self.gamma),
            weight=torch.ones_like(blocks["reward"]),
            state=HiddenState.concatenate([group.state for group in self.groups.values()]),
            last_state=HiddenState.concatenate([group.last_state for group in self.groups.values()]),
            version=None if self.versions is None else self.versions[: self.columns],
        )

    def schedule(self, progress: float) -> None:
        """Set the discount, if it is a schedule."""
        self.gamma = value_at(self._given_gamma, progress)

    def receive(self, unroll: Unroll) -> None:
        """Add an unroll as the next free columns; the first one after a read starts a new batch.

        It is copied, unless it has all columns and is on this device.
        """
        if self.consumed or self.versions is None:
            self.consumed, self.groups, self.columns = False, {}, self.batch
            self.versions = torch.zeros(self.batch, dtype=torch.int64)
        start = max((group.rows.stop for group in self.groups.values()), default=0)
        stop = start + unroll.rows.size
        if stop > self.batch:
            raise ValueError(f"the batch has {self.batch} columns, of which {start} are full; read it first")
        whole = unroll.rows.size == self.batch and self.device.type == "cpu"
        states: dict[str, HiddenState] = {"state": HiddenState(), "last_state": HiddenState()}
        for key, x in unroll.tensors.items():
            kind, _, name = key.partition("/")
            if kind in states:
                states[kind][name] = x if whole else x.to(self.device, copy=True)
            elif whole:
                self.blocks[key] = x
            else:
                self._allocate({key: x[0]}, len(x))
                self.blocks[key][:, start:stop].copy_(x)
        group = RolloutGroup(slice(start, stop), self.device)
        group.cursor, group.state, group.last_state = self.length, states["state"], states["last_state"]
        self.groups[start] = group
        self.versions[start:stop] = unroll.version

    def finish(self) -> None:
        """End the batch with the columns received so far."""
        self.columns = max(group.rows.stop for group in self.groups.values())

    def amend(self, step: EnvStep) -> None:
        """Overwrite the last observation of every row; where an episode was lost, the transition to it is not real."""
        for group in self.groups.values():
            rows, time = step.rows(group.rows), group.cursor
            torch._foreach_copy_(group.observation[time], [*rows.observation.values(), rows.first])
            if time:
                self.blocks["real"][time - 1, group.rows].logical_and_(rows.real)
            if time == self.length:
                group.last_return = group.last_return.masked_fill(rows.first, 0)

    def state_dict(self) -> State:
        """Return the unfinished rollout; of one that was read, only the last observation, which starts the next."""
        blocks, groups = self.blocks, self.groups
        if self.consumed and self.versions is not None:
            blocks, groups = {}, {}  # the workers continue their unrolls
        elif self.consumed:
            blocks = {name: x[self.length :] for name, x in blocks.items() if _has_last_step(name)}
        elif groups:  # without what an earlier rollout left behind the last step
            written = max(1, *(group.cursor for group in groups.values()))
            blocks = {name: x[: written + _has_last_step(name)] for name, x in blocks.items()}
        received: State = {} if self.versions is None else {"versions": self.versions}
        return received | {
            "consumed": self.consumed,
            "blocks": dict(blocks),
            "groups": [
                {"start": group.rows.start, "stop": group.rows.stop, "cursor": group.cursor}
                | {"state": dict(group.state), "last_state": dict(group.last_state), "last_return": group.last_return}
                for group in groups.values()
            ],
        }

    def load_state_dict(self, state: State) -> None:
        self.consumed, self.versions = state["consumed"], state.get("versions")
        start = self.length if self.consumed else 0
        for name, x in state["blocks"].items():
            self._allocate({name: x[0]}, self.length + _has_last_step(name))
            self.blocks[name][start : start + len(x)].copy_(x)
        if self.blocks:
            flag = torch.zeros(1, dtype=torch.bool)
            self._allocate(dict.fromkeys(TRANSITION, flag) | {"reward": torch.zeros(1)}, self.length)
        self.groups = {}
        for saved in state["groups"]:
            group = self._add_group(saved["start"], saved["stop"])
            group.cursor, group.last_return = saved["cursor"], saved["last_return"].to(self.device)
            group.state, group.last_state = (
                HiddenState(saved[name]).map(lambda x: x.to(self.device)) for name in ("state", "last_state")
            )

    def _add_group(self, start: int, stop: int) -> RolloutGroup:
        group = self.groups[start] = RolloutGroup(slice(start, stop), self.device)
        self.groups = dict(sorted(self.groups.items()))
        seen = [name for name in self.blocks if name.startswith("observation/")]
        group.observation = group.views(self.blocks, [*seen, "first"])
        group.transition = group.views(self.blocks, TRANSITION)
        return group

    def _allocate(self, like: Tensors, length: int) -> None:
        """Allocate the missing blocks for tensors ``[B, …]`` like these."""
        for name, x in like.items():
            if name not in self.blocks:
                given = self.memory.get(name)
                self.blocks[name] = zeros_like_step(x, length, self.batch, self.device) if given is None else given


def zeros_like_step(x: Tensor, length: int, batch: int, device: torch.device) -> Tensor:
    """Return zeros ``[length, batch, …]`` for steps ``[B, …]`` like ``x``; images are channels-last in memory."""
    if x.dim() == 4 and x.shape[1] < min(x.shape[2:]):
        channels, height, width = x.shape[1:]
        return torch.zeros(length, batch, height, width, channels, dtype=x.dtype, device=device).movedim(-1, 2)
    return torch.zeros((length, batch, *x.shape[1:]), dtype=x.dtype, device=device)


def select_prefix(blocks: Tensors, kind: str) -> Tensors:
    """Return the blocks named ``kind/…``, without the prefix."""
    return {name[len(kind) + 1 :]: x for name, x in blocks.items() if name.startswith(f"{kind}/")}


def _has_last_step(name: str) -> bool:
    """Whether a block has T+1 steps."""
    return name == "first" or name.startswith("observation/")
