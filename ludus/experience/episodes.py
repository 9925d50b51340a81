"""A cache of whole episodes, for agents that learn from returns without bootstrapping."""

from __future__ import annotations

from collections.abc import Mapping
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
from ludus.experience.memory import spec_bytes
from ludus.experience.rollout import select_prefix
from ludus.ops.returns import running_returns

LONGEST = 100_000  # most steps of each environment in a batch
PAUSE = 64  # steps of each environment after which the container gets control, for the log and signals
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

    def why_no_update(self, steps: int, environments: int, cache: Mapping[str, float]) -> str:
        """Compare the steps of each environment with the episodes that an update takes."""
        return (
            f"{steps // environments:,} steps of each environment were too few for agent.episodes = {self.episodes} "
            "whole episodes; raise nb_step, lower env.num or agent.episodes, or set env.max_episode_steps"
        )


class EpisodeGroup:
    """Rows that step together: their steps since the last batch, and where the episodes to learn from are in them."""

    def __init__(self, rows: slice, state: HiddenState, device: torch.device) -> None:
        self.rows, size = rows, rows.stop - rows.start
        self.state = state.map(torch.zeros_like)  # of a batch, in which every row begins with a reset
        self.observations: list[Tensors] = []  # observation/… and first, [b, …] each
        self.transitions: list[Tensors] = []  # TRANSITION, final/… and experience/final_value
        self.actions: list[Tensors] = []  # action/… and experience/…
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

    def clear(self) -> None:
        """Keep only the last observation, on which the agent acts next."""
        self.observations, self.transitions, self.actions = self.observations[-1:], [], []
        self.begin = self.observations[0]["first"].long() - 1  # 0 where it begins an episode, else -1
        self.end, self.ended = torch.full_like(self.end, -1), torch.zeros_like(self.ended)

    def take(self, length: int, masks: list[str]) -> Tensors:
        """Return the episodes ``[length, b, …]`` (observations: one more), each row from its ``begin`` on.

        What comes after the end of a shorter row is not real. There ``masks`` allow everything, since the repeated
        action need not be legal at the repeated observation.
        """
        row = torch.arange(len(self.begin), device=self.begin.device)
        time = torch.arange(length + 1, device=row.device).unsqueeze(1)  # [T+1, 1]
        seen = torch.minimum(self.begin + time, self.end)
        done = torch.minimum(seen[:-1], self.end - 1)
        taken = {name: x[seen, row] for name, x in stack(self.observations).items()}
        taken |= {name: x[done, row] for name, x in (stack(self.transitions) | stack(self.actions)).items()}
        inside = time[:-1] < self.end - self.begin
        taken["real"] &= inside
        for name in masks:
            mask = taken[name][:-1]
            mask.masked_fill_(~inside.view(*inside.shape, *[1] * (mask.dim() - 2)), 1)
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
        self._discount, self.gamma = gamma, value_at(gamma, 0.0)  # may be a schedule
        self.with_returns = with_returns  # whether batches contain each row's running return (Batch.row_state)
        self.groups: dict[int, EpisodeGroup] = {}  # by first row
        masks = [name for name, spec in observation.items() if is_mask(name) or spec.masks is not None]
        self._masks = [f"observation/{name}" for name in masks]
        self._step_bytes = STEP_BYTES + sum(
            spec_bytes(spec) for specs in (observation, action) for spec in specs.values()
        )

    @property
    def max_bytes(self) -> int:
        return LONGEST * self.batch * self._step_bytes

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
        if len(group.observations) > LONGEST:
            raise UserError(
                f"The agent learns from whole episodes, and some had no end after {LONGEST:,} steps; set "
                "env.max_episode_steps to the length at which an episode may be cut."
            )

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
        self.gamma = value_at(self._discount, progress)

    def read(self) -> Batch:
        """Return the episodes and drop what was collected."""
        groups = list(self.groups.values())
        length = max(int((group.end - group.begin).max()) for group in groups)
        parts = [group.take(length, self._masks) for group in groups]
        for group in groups:
            group.clear()
        blocks = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
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
            rows, last = step.rows(group.rows), group.observations[-1]
            begins = rows.first & ~last["first"]
            last |= {f"observation/{name}": x.clone() for name, x in rows.observation.items()}
            last["first"] = rows.first.clone()
            if group.transitions:
                group.transitions[-1]["real"] &= rows.real
            group.track(begins, torch.zeros_like(begins), self.episodes)

    def state_dict(self) -> State:
        """Return all steps since the last batch."""
        return {
            "groups": [
                {"start": group.rows.start, "stop": group.rows.stop, "state": dict(group.state)}
                | {name: getattr(group, name) for name in ("over", "begin", "end", "ended")}
                | {name: stack(getattr(group, name)) for name in ("observations", "transitions", "actions")}
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
                steps = {key: x.to(self.device).unbind() for key, x in saved[name].items()}
                parts = zip(*steps.values(), strict=True)
                setattr(group, name, [dict(zip(steps, part, strict=True)) for part in parts])

    def _add_group(self, rows: slice, state: HiddenState) -> EpisodeGroup:
        group = self.groups[rows.start] = EpisodeGroup(rows, state, self.device)
        self.groups = dict(sorted(self.groups.items()))
        return group


def stack(steps: list[Tensors]) -> Tensors:
    """Return steps of tensors ``[b, …]`` as one dict of tensors ``[n, b, …]``."""
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]} if steps else {}
