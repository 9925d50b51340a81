"""On-policy experience: the last T steps of B environments."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.agent import ExperienceCache
from ludus.core.types import AgentStep, Batch, EnvStep, HiddenState, State, Tensors
from ludus.experience.lane import ENDING, Lane, block


class RolloutCache(ExperienceCache):
    """A preallocated block ``[T+1, B, …]`` per tensor; each tensor is copied into it once.

    Row T of one rollout is row 0 of the next: the agent acts on that observation only after it has learned. Groups of
    environments that step on their own write lanes of the block, each at its own time step.
    """

    def __init__(self, length: int, batch: int, gamma: float, device: torch.device) -> None:
        self.length, self.batch, self.gamma, self.device = length, batch, gamma, device
        self._consumed = False
        self._blocks: dict[str, Tensor] = {}
        self._lanes: dict[int, Lane] = {}  # by their first row
        self._covered = 0  # rows that belong to a lane

    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0) -> None:
        """Write observation and ``first`` at the next row, reward and endings at the one before."""
        lane = self._lanes.get(start) or self._open(step, start)
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
        if at == self.length:
            lane.last_state = state.map(torch.clone)  # acting's own are inference tensors

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """Write action and experience at the row of the last observation."""
        lane = self._lanes[start]
        if lane.cursor == self.length:
            self._consumed = False
            lane.carry(self.length)
        if not lane.said:
            self._allocate({f"action/{k}": x for k, x in step.action.items()}, self.length)
            self._allocate({f"experience/{k}": x for k, x in step.experience.items()}, self.length)
            lane.view(self._blocks)
        at = lane.cursor
        for target, x in zip(lane.said, (*step.action.values(), *step.experience.values()), strict=True):
            target[at].copy_(x)

    def ready(self) -> bool:
        """Whether T steps of every row are there and have not been read."""
        if self._consumed or self._covered < self.batch:
            return False
        return all([lane.cursor == self.length for lane in self._lanes.values()])

    def accepts(self, start: int) -> bool:
        """Whether these rows have less than T steps."""
        return self._lanes[start].cursor < self.length

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
            state=HiddenState.join([lane.state for lane in self._lanes.values()]),
            last_state=HiddenState.join([lane.last_state for lane in self._lanes.values()]),
        )

    def amend(self, step: EnvStep) -> None:
        """Write the last observation of every row again."""
        for lane in self._lanes.values():
            for target, x in zip(lane.observation, step.observation.values(), strict=True):
                target[lane.cursor].copy_(x[lane.rows])
            lane.first[lane.cursor].copy_(step.first[lane.rows])

    def state_dict(self) -> State:
        """The open rollout; of one that was learned from, only the row that begins the next."""
        blocks = (
            {k: x[self.length :] for k, x in self._blocks.items() if _carried(k)} if self._consumed else self._blocks
        )
        return {
            "consumed": self._consumed,
            "blocks": dict(blocks),
            "lanes": [
                {"start": lane.rows.start, "stop": lane.rows.stop, "cursor": lane.cursor}
                | {"state": dict(lane.state), "last_state": dict(lane.last_state)}
                for lane in self._lanes.values()
            ],
        }

    def load_state_dict(self, state: State) -> None:
        """Take over an open rollout."""
        self._consumed = state["consumed"]
        start = self.length if self._consumed else 0
        for name, x in state["blocks"].items():
            self._allocate({name: x[0]}, self.length + _carried(name))
            self._blocks[name][start : start + len(x)].copy_(x)
        if self._blocks:
            ending = (torch.zeros(1), *(torch.zeros(1, dtype=torch.bool) for _ in range(2)))
            self._allocate(dict(zip(ENDING, ending, strict=True)), self.length)
        self._lanes, self._covered = {}, 0
        for saved in state["lanes"]:
            lane = self._add_lane(saved["start"], saved["stop"])
            lane.cursor = saved["cursor"]
            lane.state, lane.last_state = (
                HiddenState(saved[name]).map(lambda x: x.to(self.device)) for name in ("state", "last_state")
            )

    def _open(self, step: EnvStep, start: int) -> Lane:
        """Make the lane of the rows from ``start`` on, at its first write."""
        observation = {f"observation/{k}": x for k, x in step.observation.items()}
        self._allocate(observation | {"first": step.first}, self.length + 1)
        self._allocate({k: getattr(step, k) for k in ENDING}, self.length)
        return self._add_lane(start, start + len(step.first))

    def _add_lane(self, start: int, stop: int) -> Lane:
        lane = self._lanes[start] = Lane(slice(start, stop), self._blocks)
        self._lanes = dict(sorted(self._lanes.items()))
        self._covered += stop - start
        return lane

    def _allocate(self, like: Tensors, length: int) -> None:
        for name, x in like.items():
            if name not in self._blocks:
                self._blocks[name] = block(length, self.batch, x, self.device)

    def _named(self, kind: str) -> Tensors:
        return {k[len(kind) + 1 :]: x for k, x in self._blocks.items() if k.startswith(kind + "/")}


def _carried(name: str) -> bool:
    return name == "first" or name.startswith("observation/")
