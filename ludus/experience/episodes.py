"""A cache of whole episodes, for agents that learn from returns without bootstrapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.cache import ExperienceCache
from ludus.core.config import AgentConfig, Plan
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.schedule import value_at
from ludus.core.spec import Specs, is_mask
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors
from ludus.experience.memory import check_fits, free_bytes, spec_bytes
from ludus.experience.rollout import select_prefix
from ludus.ops.returns import running_returns

LONGEST = 100_000  # most steps of each environment in a batch, per episode of it
# steps of each environment after which they are stacked, and the container gets control, for the log and signals
PAUSE = 64
CHECK_EVERY = 2**26  # bytes: how often to ask for the free memory, which takes a millisecond
STEP_BYTES = 64  # of a step beside observation and action: reward, flags, log-probability, value
TRANSITION = ("reward", "terminated", "truncated", "real")


@dataclass(frozen=True)
class EpisodeConfig(AgentConfig):
    """Settings of agents that learn from whole episodes."""

    # whole episodes of each environment per update: more give updates with less noise, and fewer of them
    episodes: int = 1

    def plan(self, rows: int) -> Plan:
        """Return the plan; the shape of a batch changes with the lengths of its episodes."""
        return Plan(fixed_shapes=False)

    def why_no_update(self, steps: int, environments: int, agents: int, cache: Mapping[str, float]) -> str:
        """Compare the steps of each environment with the episodes that an update takes."""
        return (
            f"{steps // environments:,} steps of each environment were too few for agent.episodes = {self.episodes} "
            "whole episodes; raise nb_step, lower env.num or agent.episodes, or set env.max_episode_steps"
        )


class StepList:
    """Steps ``[b, …]`` of some rows; all but the last few are in blocks of PAUSE, ``[PAUSE, b, …]``.

    As a tensor of its own, a step of a few numbers takes several times their bytes.
    """

    def __init__(self) -> None:
        self.recent: list[Tensors] = []  # the last steps, at most PAUSE; the very last one may be changed
        self.bytes = 0  # of the blocks
        self._blocks: list[Tensors] = []
        self._length = 0  # steps in the blocks

    def __len__(self) -> int:
        return self._length + len(self.recent)

    def append(self, step: Tensors) -> None:
        """Add a step."""
        if len(self.recent) == PAUSE:
            self._add_block(stack(self.recent), PAUSE)
            self.recent = []
        self.recent.append(step)

    def whole(self) -> Tensors:
        """Return all steps as tensors ``[n, b, …]``."""
        blocks = [*self._blocks, stack(self.recent)] if self.recent else []
        return {name: torch.cat([block[name] for block in blocks]) for name in (blocks[0] if blocks else ())}

    def load(self, steps: Tensors) -> None:
        """Add what ``whole`` returned to an empty list."""
        if steps:
            self._add_block({name: x[:-1] for name, x in steps.items()}, len(next(iter(steps.values()))) - 1)
            self.recent = [{name: x[-1].clone() for name, x in steps.items()}]

    def drain(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the steps ``[n, b, …]`` of one tensor after the other, and forget them."""
        blocks = [*self._blocks, stack(self.recent)]
        self.recent, self.bytes, self._blocks, self._length = [], 0, [], 0
        for name in list(blocks[0]):
            yield name, torch.cat([block.pop(name) for block in blocks])

    def _add_block(self, block: Tensors, length: int) -> None:
        self._blocks.append(block)
        self._length += length
        self.bytes += sum(x.nbytes for x in block.values())


class EpisodeGroup:
    """Rows that step together: their steps since the last batch, and where the episodes to learn from are in them."""

    def __init__(self, rows: slice, state: HiddenState, device: torch.device) -> None:
        self.rows, size = rows, rows.stop - rows.start
        self.state = state.map(torch.zeros_like)  # of a batch, in which every row begins with a reset
        self.observations = StepList()  # observation/… and first
        self.transitions = StepList()  # TRANSITION, final/… and experience/final_value
        self.actions = StepList()  # action/… and experience/…
        self.over = torch.zeros(size, dtype=torch.bool, device=device)  # an episode has ended, and its reset is to come
        # of each row: the time of its first episode's start, -1 before; how many have ended since; when the last did
        self.begin, self.end = (torch.full((size,), -1, device=device) for _ in range(2))
        self.ended = torch.zeros(size, dtype=torch.int64, device=device)

    def track(self, first: Tensor, ends: Tensor, episodes: int) -> None:
        """Take note of resets and endings at the last observation; a reset without an ending drops a lost episode."""
        time = len(self.observations) - 1
        waiting = self.end < 0
        self.ended += ends & (self.begin >= 0) & waiting
        self.end = torch.where(waiting & (self.ended >= episodes), time, self.end)
        over, waiting = self.over | ends, self.end < 0
        lost = first & ~over & waiting & (self.begin >= 0)
        self.begin = torch.where(lost | (first & waiting & (self.begin < 0)), time, self.begin)
        self.ended = self.ended.masked_fill(lost, 0)
        self.over = over & ~first

    @property
    def bytes(self) -> int:
        """The memory of the blocks of steps."""
        return self.observations.bytes + self.transitions.bytes + self.actions.bytes

    def take(self, length: int, masks: list[str]) -> Tensors:
        """Return the episodes ``[length, b, …]`` (observations: one more), each row from its ``begin`` on.

        What comes after the end of a shorter row is not real. There ``masks`` allow everything, since the repeated
        action need not be legal at the repeated observation. Only the last observation is kept, on which the agent acts
        next.
        """
        last = self.observations.recent[-1]
        row = torch.arange(len(self.begin), device=self.begin.device)
        time = torch.arange(length + 1, device=row.device).unsqueeze(1)  # [T+1, 1]
        seen = torch.minimum(self.begin + time, self.end)
        done = torch.minimum(seen[:-1], self.end - 1)
        taken = {name: x[seen, row] for name, x in self.observations.drain()}
        for steps in (self.transitions, self.actions):
            taken |= {name: x[done, row] for name, x in steps.drain()}
        inside = time[:-1] < self.end - self.begin
        taken["real"] &= inside
        for name in masks:
            mask = taken[name][:-1]
            mask.masked_fill_(~inside.view(*inside.shape, *[1] * (mask.dim() - 2)), 1)
        self.observations.append(last)
        self.begin = last["first"].long() - 1  # 0 where it begins an episode, else -1
        self.end, self.ended = torch.full_like(self.end, -1), torch.zeros_like(self.ended)
        return taken


class EpisodeCache(ExperienceCache):
    """Collects the next ``episodes`` whole episodes of each row; those that a batch leaves unfinished are not used.

    All of a batch was so played by the policy that learns from it. In rows whose episodes are over, the environment
    plays on until those of the other rows are.
    """

    def __init__(
        self,
        episodes: int,
        batch: int,
        gamma: float,
        observation: Specs,
        action: Specs,
        device: torch.device,
        with_returns: bool = False,
    ) -> None:
        self.episodes, self.batch, self.device = episodes, batch, device
        self._given_gamma, self.gamma = gamma, value_at(gamma, 0.0)  # may be a schedule
        self.with_returns = with_returns  # whether batches contain each row's running return (Batch.row_state)
        self.groups: dict[int, EpisodeGroup] = {}  # by first row
        masks = [name for name, spec in observation.items() if is_mask(name) or spec.masks is not None]
        self._masks = [f"observation/{name}" for name in masks]
        self._longest = LONGEST * episodes
        self._checked = 0  # bytes stored when the free memory was last compared with them
        observed, acted = (sum(spec_bytes(spec) for spec in specs.values()) for specs in (observation, action))
        self._step_bytes = STEP_BYTES + 2 * observed + acted  # with final observations, where environments give them

    @property
    def max_bytes(self) -> int:
        return self._longest * self.batch * self._step_bytes

    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        """Append the observation and the transition that led to it."""
        group = self.groups.get(start)
        if group is None:
            group = self._add_group(slice(start, start + len(step.first)), state)
        observation = {f"observation/{name}": x.clone() for name, x in step.observation.items()}
        group.observations.append(observation | {"first": step.first.clone()})
        if len(group.observations) > 1:
            transition = {name: getattr(step, name).clone() for name in TRANSITION}
            if final_value is not None:
                transition["experience/final_value"] = final_value.clone()
            elif step.final is not None:
                transition |= {f"final/{name}": x.clone() for name, x in step.final.items()}
            group.transitions.append(transition)
        group.track(step.first, (step.terminated | step.truncated) & step.real, self.episodes)
        if len(group.observations) > self._longest:
            raise UserError(
                f"The agent learns from whole episodes, and some had no end after {self._longest:,} steps; set "
                "env.max_episode_steps to the length at which an episode may be cut."
            )
        if len(group.observations) % PAUSE == 0:
            self._check_memory()

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """Append action and experience."""
        action = {f"action/{name}": x.clone() for name, x in step.action.items()}
        experience = {f"experience/{name}": x.clone() for name, x in step.experience.items()}
        self.groups[start].actions.append(action | experience)

    def ready(self) -> bool:
        """Whether the episodes of all rows are over."""
        over = [bool((group.end >= 0).all()) for group in self.groups.values()]
        return all(over) and sum(len(group.end) for group in self.groups.values()) == self.batch

    def accepts(self, start: int) -> bool:
        """Whether these rows may step again; the container gets control now and then."""
        return len(self.groups[start].observations) % PAUSE != 0 and not self.ready()

    def schedule(self, progress: float) -> None:
        """Set the discount, if it is a schedule."""
        self.gamma = value_at(self._given_gamma, progress)

    def read(self) -> Batch:
        """Return the episodes and drop what was collected."""
        groups = list(self.groups.values())
        length = max(int((group.end - group.begin).max()) for group in groups)
        self._checked = 0
        blocks, *others = (group.take(length, self._masks) for group in groups)
        if others:
            blocks = {name: torch.cat([x, *(part.pop(name) for part in others)], 1) for name, x in blocks.items()}
        terminated, truncated, real = blocks["terminated"], blocks["truncated"], blocks["real"]
        batch = Batch(
            observation=select_prefix(blocks, "observation"),
            first=blocks["first"],
            action=select_prefix(blocks, "action"),
            reward=blocks["reward"],
            terminated=terminated,
            truncated=truncated,
            discount=(~terminated).to(torch.float32).mul_(self.gamma),
            real=real,
            weight=torch.ones_like(blocks["reward"]),
            experience=select_prefix(blocks, "experience"),
            state=HiddenState.concatenate([group.state for group in groups]),
            final=select_prefix(blocks, "final"),
        )
        if self.with_returns:
            zeros = torch.zeros(self.batch, dtype=torch.float64, device=self.device)
            batch.row_state["return"] = running_returns(batch.reward, terminated | truncated, real, self.gamma, zeros)[
                0
            ]
        return batch

    def amend(self, step: EnvStep) -> None:
        """Replace the last observation of every row; where an episode was lost, the transition to it is not real."""
        for group in self.groups.values():
            rows, last = step.rows(group.rows), group.observations.recent[-1]
            begins = rows.first & ~last["first"]
            last |= {f"observation/{name}": x.clone() for name, x in rows.observation.items()}
            last["first"] = rows.first.clone()
            if group.transitions.recent:
                group.transitions.recent[-1]["real"] &= rows.real
            group.track(begins, torch.zeros_like(begins), self.episodes)

    def state_dict(self) -> State:
        """Return all steps since the last batch."""
        return {
            "groups": [
                {"start": group.rows.start, "stop": group.rows.stop, "state": dict(group.state)}
                | {name: getattr(group, name) for name in ("over", "begin", "end", "ended")}
                | {name: getattr(group, name).whole() for name in ("observations", "transitions", "actions")}
                for group in self.groups.values()
            ]
        }

    def load_state_dict(self, state: State) -> None:
        """Load what ``state_dict`` returned."""
        self.groups = {}
        for saved in state["groups"]:
            group = self._add_group(slice(saved["start"], saved["stop"]), HiddenState(saved["state"]))
            group.state = group.state.map(lambda x: x.to(self.device))
            for name in ("over", "begin", "end", "ended"):
                setattr(group, name, saved[name].to(self.device))
            for name in ("observations", "transitions", "actions"):
                getattr(group, name).load({key: x.to(self.device) for key, x in saved[name].items()})

    def _check_memory(self) -> None:
        """Refuse episodes that leave too little memory for the batch, which is about as large as what is stored."""
        groups = self.groups.values()
        stored = sum(group.bytes for group in groups)
        if stored < self._checked + CHECK_EVERY:
            return
        self._checked = stored
        steps = sum(len(group.observations) * (group.rows.stop - group.rows.start) for group in groups)
        what = f"Learning from whole episodes, of {steps:,} steps so far, needs another"
        fix = "set env.max_episode_steps to the length at which one may be cut, or lower agent.episodes or env.num"
        check_fits(what, stored, free_bytes(self.device, ""), fix)

    def _add_group(self, rows: slice, state: HiddenState) -> EpisodeGroup:
        group = self.groups[rows.start] = EpisodeGroup(rows, state, self.device)
        self.groups = dict(sorted(self.groups.items()))
        return group


def stack(steps: list[Tensors]) -> Tensors:
    """Return steps of tensors ``[b, …]`` as one dict of tensors ``[n, b, …]``."""
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
