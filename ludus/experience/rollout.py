"""On-policy experience: the last T steps of B environments."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.cache import ExperienceCache, Unroll
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors
from ludus.ops.returns import running_returns

ENDING = ("reward", "terminated", "truncated", "real")
FINAL_VALUE = "experience/final_value"  # written with the step after the action, not with it


class RolloutRows:
    """Rows that are written together: their views by time step, made once, as indexing costs more than the copy."""

    def __init__(self, rows: slice, blocks: Tensors) -> None:
        self.rows = rows
        self.cursor = -1  # the time step of the last observation; -1 before the first
        self.state, self.last_state = HiddenState(), HiddenState()
        self.carried = torch.zeros(rows.stop - rows.start, dtype=torch.float64, device=blocks["first"].device)
        self.view(blocks)

    def view(self, blocks: Tensors) -> None:
        """Look at the blocks that there are; actions and final observations come later than the first observation."""
        views = {name: list(x[:, self.rows].unbind(0)) for name, x in blocks.items()}
        self.observation = [x for name, x in views.items() if name.startswith("observation/")]
        self.final_value = views.pop(FINAL_VALUE, [])
        self.agent = [x for kind in ("action/", "experience/") for name, x in views.items() if name.startswith(kind)]
        self.final = [x for name, x in views.items() if name.startswith("final/")]
        self.first, self.reward, self.terminated, self.truncated, self.real = (
            views[name] for name in ("first", *ENDING)
        )

    def carry(self, length: int) -> None:
        """Make the last observation the first of the next rollout."""
        for rows in (*self.observation, self.first):
            rows[0].copy_(rows[length])
        self.state, self.cursor = self.last_state, 0


class RolloutCache(ExperienceCache):
    """A preallocated block ``[T+1, B, …]`` per tensor; each tensor is copied into it once.

    Row T of one rollout is row 0 of the next: the agent acts on that observation only after it has learned. Groups of
    environments that step on their own write lanes of the block, each at its own time step.
    """

    def __init__(
        self,
        length: int,
        batch: int,
        gamma: float,
        device: torch.device,
        keeps_return: bool = False,
        rows: Rows | None = None,
        memory: Tensors | None = None,
    ) -> None:
        self.rows = rows or Rows.all(batch)
        self.memory = memory or {}  # blocks that are used in place of new ones
        self.versions: Tensor | None = None  # [B] of what was received
        self.received = 0  # columns of the batch that were
        self.keeps_return = keeps_return  # give each row's running return too (Batch.row_state)
        self.length, self.batch, self.gamma, self.device = length, batch, gamma, device
        self.consumed = False
        self.blocks: dict[str, Tensor] = {}
        self.lanes: dict[int, RolloutRows] = {}  # by their first row
        self.covered = 0  # rows that belong to a lane

    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        """Write observation and ``first`` at the next row, reward, endings and ``final`` at the one before."""
        lane = self.lanes.get(start) or self._open(step, start)
        lane.cursor += 1
        at = lane.cursor
        for target, x in zip(lane.observation, step.observation.values(), strict=True):
            target[at].copy_(x)
        lane.first[at].copy_(step.first)
        if at == 0:
            lane.state = state.map(torch.clone)
            return
        lane.reward[at - 1].copy_(step.reward)
        lane.terminated[at - 1].copy_(step.terminated)
        lane.truncated[at - 1].copy_(step.truncated)
        lane.real[at - 1].copy_(step.real)
        if step.final is not None:
            self._write_final(lane, step.final, final_value)
        if at == self.length:
            lane.last_state = state.map(torch.clone)  # acting's own are inference tensors
            if self.keeps_return:
                self._sum_returns(lane)

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """Write action and experience at the row of the last observation."""
        lane = self.lanes[start]
        if lane.cursor == self.length:
            self.consumed = False
            lane.carry(self.length)
        if not lane.agent:
            self.allocate({f"action/{k}": x for k, x in step.action.items()}, self.length)
            self.allocate({f"experience/{k}": x for k, x in step.experience.items()}, self.length)
            lane.view(self.blocks)
        at = lane.cursor
        for target, x in zip(lane.agent, (*step.action.values(), *step.experience.values()), strict=True):
            target[at].copy_(x)

    def ready(self) -> bool:
        """Whether T steps of every row are there and have not been read."""
        if self.consumed or self.covered < self.batch:
            return False
        return all([lane.cursor == self.length for lane in self.lanes.values()])

    def accepts(self, start: int) -> bool:
        """Whether these rows have less than T steps."""
        return self.lanes[start].cursor < self.length

    def read(self) -> Batch:
        """The rollout, as views into the block."""
        self.consumed = True
        terminated, reward = self.blocks["terminated"], self.blocks["reward"]
        return Batch(
            observation=self._named("observation"),
            first=self.blocks["first"],
            action=self._named("action"),
            reward=reward,
            terminated=terminated,
            truncated=self.blocks["truncated"],
            discount=(~terminated).to(torch.float32).mul_(self.gamma),
            real=self.blocks["real"],
            weight=torch.ones_like(reward),
            experience=self._named("experience"),
            state=HiddenState.concatenate([lane.state for lane in self.lanes.values()]),
            last_state=HiddenState.concatenate([lane.last_state for lane in self.lanes.values()]),
            final=self._named("final"),
            version=self.versions,
            row_state=self._named("row_state"),
        )

    def submit(self) -> Unroll:
        """The rollout in its memory, hidden states included."""
        if not self.ready():
            raise ValueError("an unroll was submitted before it was full")
        self.consumed = True
        tensors = dict(self.blocks)
        for kind in ("state", "last_state"):
            for name, x in HiddenState.concatenate([getattr(lane, kind) for lane in self.lanes.values()]).items():
                place = f"{kind}/{name}"
                tensors[place] = self.memory[place].copy_(x) if place in self.memory else x
        return Unroll(tensors, self.rows, self.version)

    def receive(self, unroll: Unroll) -> None:
        """Copy an unroll into the next free columns; the first after a read begins another batch."""
        if self.consumed or self.versions is None:
            self.consumed, self.received, self.lanes, self.covered = False, 0, {}, 0
            self.versions = torch.zeros(self.batch, dtype=torch.int64)
        start, stop = self.received, self.received + unroll.rows.size
        if stop > self.batch:
            raise ValueError(f"the batch has {self.batch} columns, of which {start} are full; read it first")
        states: dict[str, HiddenState] = {"state": HiddenState(), "last_state": HiddenState()}
        for place, x in unroll.tensors.items():
            kind, _, name = place.partition("/")
            if kind in states:
                states[kind][name] = x.to(self.device, copy=True)
            else:
                self.allocate({place: x[0]}, len(x))
                self.blocks[place][:, start:stop].copy_(x)
        lane = self.add_lane(start, stop)
        lane.cursor, lane.state, lane.last_state = self.length, states["state"], states["last_state"]
        self.versions[start:stop], self.received = unroll.version, stop

    def amend(self, step: EnvStep) -> None:
        """Write the last observation of every row again; a transition to one that is lost is no longer real."""
        for lane in self.lanes.values():
            for target, x in zip(lane.observation, step.observation.values(), strict=True):
                target[lane.cursor].copy_(x[lane.rows])
            lane.first[lane.cursor].copy_(step.first[lane.rows])
            if lane.cursor:
                lane.real[lane.cursor - 1].logical_and_(step.real[lane.rows])
            if lane.cursor == self.length:
                lane.carried = lane.carried.masked_fill(step.first[lane.rows], 0)

    def state_dict(self) -> State:
        """The open rollout; of one that was learned from, only the row that begins the next."""
        blocks = self.blocks
        if self.consumed:
            blocks = {name: x[self.length :] for name, x in blocks.items() if _carried(name)}
        return {
            "consumed": self.consumed,
            "blocks": dict(blocks),
            "lanes": [
                {"start": lane.rows.start, "stop": lane.rows.stop, "cursor": lane.cursor}
                | {"state": dict(lane.state), "last_state": dict(lane.last_state), "carried": lane.carried}
                for lane in self.lanes.values()
            ],
        }

    def load_state_dict(self, state: State) -> None:
        """Take over an open rollout."""
        self.consumed = state["consumed"]
        start = self.length if self.consumed else 0
        for name, x in state["blocks"].items():
            self.allocate({name: x[0]}, self.length + _carried(name))
            self.blocks[name][start : start + len(x)].copy_(x)
        if self.blocks:
            ending = (torch.zeros(1), *(torch.zeros(1, dtype=torch.bool) for _ in range(3)))
            self.allocate(dict(zip(ENDING, ending, strict=True)), self.length)
        self.lanes, self.covered = {}, 0
        for saved in state["lanes"]:
            lane = self.add_lane(saved["start"], saved["stop"])
            lane.cursor, lane.carried = saved["cursor"], saved["carried"].to(self.device)
            lane.state, lane.last_state = (
                HiddenState(saved[name]).map(lambda x: x.to(self.device)) for name in ("state", "last_state")
            )

    def _write_final(self, lane: RolloutRows, final: Tensors, value: Tensor | None) -> None:
        """Write the last observations of episodes, or in their place what a network with a memory made of them."""
        kept = {f"final/{k}": x for k, x in final.items()} if value is None else {FINAL_VALUE: value}
        if not (lane.final or lane.final_value):
            self.allocate(kept, self.length)
            lane.view(self.blocks)
        targets = lane.final if value is None else [lane.final_value]
        for target, x in zip(targets, kept.values(), strict=True):
            target[lane.cursor - 1].copy_(x)

    def _sum_returns(self, lane: RolloutRows) -> None:
        """Compute the running returns of a full rollout."""
        rows, blocks = lane.rows, self.blocks
        reward, terminated, truncated, real = (blocks[name][:, rows] for name in ENDING)
        returns, lane.carried = running_returns(reward, terminated | truncated, real, self.gamma, lane.carried)
        self.allocate({"row_state/return": returns[0]}, self.length)
        blocks["row_state/return"][:, rows].copy_(returns)

    def _open(self, step: EnvStep, start: int) -> RolloutRows:
        """Make the lane of the rows from ``start`` on, at its first write."""
        observation = {f"observation/{k}": x for k, x in step.observation.items()}
        self.allocate(observation | {"first": step.first}, self.length + 1)
        self.allocate({k: getattr(step, k) for k in ENDING}, self.length)
        return self.add_lane(start, start + len(step.first))

    def add_lane(self, start: int, stop: int) -> RolloutRows:
        """Make the lane of some rows."""
        lane = self.lanes[start] = RolloutRows(slice(start, stop), self.blocks)
        self.lanes = dict(sorted(self.lanes.items()))
        self.covered += stop - start
        return lane

    def allocate(self, like: Tensors, length: int) -> None:
        """Make the blocks that are missing, for tensors like these."""
        for name, x in like.items():
            if name not in self.blocks:
                given = self.memory.get(name)
                self.blocks[name] = block(length, self.batch, x, self.device) if given is None else given

    def _named(self, kind: str) -> Tensors:
        return {k[len(kind) + 1 :]: x for k, x in self.blocks.items() if k.startswith(kind + "/")}


def block(length: int, batch: int, x: Tensor, device: torch.device) -> Tensor:
    """Zeros ``[length, batch, …]``; images ``[B, C, H, W]`` lie channels-last, so that no update has to turn them."""
    if x.dim() == 4 and x.shape[1] < min(x.shape[2:]):
        channels, height, width = x.shape[1:]
        return torch.zeros(length, batch, height, width, channels, dtype=x.dtype, device=device).movedim(-1, 2)
    return torch.zeros((length, batch, *x.shape[1:]), dtype=x.dtype, device=device)


def _carried(name: str) -> bool:
    return name == "first" or name.startswith("observation/")
