"""A reference model of the replay: random environments whose steps are stored in plain lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec, Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.experience.config import ReplayConfig
from ludus.experience.frames import frames_needed
from ludus.experience.replay import ExperienceReplay

STACK, GAMMA = 4, 0.5  # powers of 0.5 and whole rewards add up exactly, in any order
PLAIN: Specs = {"x": Spec((2,), "float32")}
STACKED: Specs = PLAIN | {"frames": Spec((STACK, 2), "int32", stack=STACK)}
CPU = torch.device("cpu")


@dataclass
class Moment:
    """One step of one environment, and the action that follows it."""

    x: list[float]
    frames: list[list[int]]
    reward: float
    terminated: bool
    truncated: bool
    first: bool
    action: float


@dataclass
class Row:
    """One environment: episodes of random lengths (1 at least) that terminate, are truncated, or get lost."""

    name: int
    rng: np.random.Generator
    longest: int
    irregular: float = 0.0  # share of the steps whose stack is not the one before it shifted by one
    steps: list[Moment] = field(default_factory=list)
    left: int = 0  # steps until the episode ends
    ending: str = "lost"
    new: bool = True  # whether the next step begins an episode

    def step(self) -> Moment:
        t = len(self.steps)
        if self.new:
            self.left, self.new = int(self.rng.integers(1, self.longest + 1)), False
            self.ending = str(self.rng.choice(["terminated", "truncated", "both", "lost"]))
            frames = [[int(i), t] for i in self.rng.integers(1_000_000, size=STACK)]  # whatever a reset pads with
            ends = first = True
            if self.steps:
                self.steps[-1].action = np.nan  # it led nowhere
        else:
            self.left -= 1
            self.new = self.left == 0
            frames = [*self.steps[-1].frames[1:], [self.name, t]]
            if self.irregular and self.rng.random() < self.irregular:
                frames = frames[::-1] if self.rng.random() < 0.5 else [[-t, i] for i in range(STACK)]
            ends, first = self.new, False
        said = [ends and self.ending in (name, "both") for name in ("terminated", "truncated")]
        reward = np.nan if first else float(self.rng.integers(-9, 10))  # that of a reset means nothing
        self.steps.append(Moment([self.name, t], frames, reward, *said, first, 1000.0 * self.name + t))
        return self.steps[-1]


class World:
    """Groups of rows that step independently; writes their steps to replays."""

    def __init__(
        self, groups: list[int], seed: int, longest: int = 6, specs: Specs = PLAIN, irregular: float = 0.0
    ) -> None:
        self.rng, self.specs, self.window = np.random.default_rng(seed), specs, False
        self.rows = [Row(i, np.random.default_rng([seed, i]), longest, irregular) for i in range(sum(groups))]
        edges = np.cumsum([0, *groups]).tolist()
        self.groups = [slice(low, high) for low, high in pairwise(edges)]

    def replay(self, **settings: Any) -> ExperienceReplay:
        config = ReplayConfig(**({"batch_size": 32, "warmup": 0} | settings))
        replay = ExperienceReplay(config, len(self.rows), GAMMA, self.specs, CPU, window=self.window)
        replay.generator.manual_seed(1)
        return replay

    def write(self, group: int, *replays: ExperienceReplay) -> None:
        """Write the action and the next step of one group."""
        rows = self.groups[group]
        here = self.rows[rows]
        if here[0].steps:
            before = [row.steps[-1] for row in here]
            for row in here:
                row.step()  # which may have made the action before it one that led nowhere
            actions = torch.tensor([moment.action for moment in before])
            said = AgentStep({"a": actions}, {"e": actions[:, None] + 0.25}, HiddenState())
            for replay in replays:
                replay.agent_write(said, rows.start)
        else:
            for row in here:
                row.step()
        time = float(len(here[0].steps) - 1)
        state = HiddenState({"h": torch.tensor([[row.name, time] for row in here])})
        for replay in replays:
            replay.env_write(self.last(rows), state, rows.start)

    def last(self, rows: slice) -> EnvStep:
        moments = [row.steps[-1] for row in self.rows[rows]]
        observation = {"x": torch.tensor([m.x for m in moments], dtype=torch.float32)}
        if "frames" in self.specs:
            observation["frames"] = torch.tensor([m.frames for m in moments], dtype=torch.int32)
        flags = [torch.tensor([getattr(m, name) for m in moments]) for name in ("terminated", "truncated", "first")]
        return EnvStep(observation, torch.tensor([m.reward for m in moments]), *flags, ~flags[-1])

    def drawable(self, length: int, span: int) -> set[tuple[int, int]]:
        """Return (time, row) of all real transitions whose next ``span`` steps are written and not overwritten."""
        found = set()
        for rows in self.groups:
            now = len(self.rows[rows.start].steps) - 1
            oldest = max(0, now - length + 1)
            if "frames" in self.specs and not self.rows[0].irregular:  # a irregular one keeps whole stacks
                oldest = max(oldest, *(self._first_whole(row, length, span) for row in self.rows[rows]), 0)
            for row in self.rows[rows]:
                found |= {(t, row.name) for t in range(oldest, now - span + 1) if not row.steps[t + 1].first}
        return found

    def _first_whole(self, row: Row, length: int, span: int) -> int:
        """Return the first time whose stack has not been overwritten."""
        places = np.cumsum([STACK if moment.first else 1 for moment in row.steps])
        kept = frames_needed(self.specs["frames"], length, span)
        return int(np.flatnonzero(places - STACK >= places[-1] - kept)[0])

    def transition(self, t: int, row: int, n: int) -> dict[str, Any]:
        """Return the expected n-step transition at ``t``."""
        steps, k, total = self.rows[row].steps, 0, 0.0
        while k < n and not steps[t + k + 1].first:
            total += GAMMA**k * steps[t + k + 1].reward
            k += 1
            if steps[t + k].terminated or steps[t + k].truncated:
                break
        end = steps[t + k]
        return {
            "x": [steps[t].x, end.x],
            "frames": [steps[t].frames, end.frames],
            "first": [steps[t].first, False],
            "action": steps[t].action,
            "reward": total,
            "discount": 0.0 if end.terminated else GAMMA**k,
            "terminated": end.terminated,
            "truncated": end.truncated,
        }
