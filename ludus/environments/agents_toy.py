"""Toy environments with several agents, with PettingZoo's parallel methods but without PettingZoo."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

ByAgent = dict[str, Any]


class CueTeam:
    """Each agent sees a cue of its own and is rewarded by 1 if it chooses it; agents leave one after the other.

    Agent i takes part in ``length - i`` steps. The last one to leave is truncated, the others terminate. With ``late``,
    the last agent comes one step after the reset. Agents called ``guide_…`` see the cue of agent_0 too.
    """

    def __init__(self, agents: int = 3, length: int = 4, cues: int = 3, late: bool = False, guides: int = 0) -> None:
        if not 0 < agents + guides <= length:
            raise ValueError(f"agents and guides ({agents + guides}) must be from 1 to length ({length})")
        self.possible_agents = [f"agent_{i}" for i in range(agents)] + [f"guide_{i}" for i in range(guides)]
        self.length, self.cues, self.late, self.guides = length, cues, late, guides
        self._step, self._cues = 0, dict[str, int]()

    def observation_space(self, agent: str) -> spaces.Box:
        """Return the space of the one-hot cue, of two cues for a guide."""
        return spaces.Box(0, 1, self._shape(agent), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        """Return the space of cues."""
        return spaces.Discrete(self.cues)

    def reset(self, seed: int | None = None, options: ByAgent | None = None) -> tuple[ByAgent, ByAgent]:
        """Begin an episode with all agents but a late one."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._step, self.agents = 0, list(self.possible_agents)
        if self.late:
            self.agents.pop()
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: ByAgent) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Reward the right cues and draw new ones."""
        self._step += 1
        acting = list(self.agents)
        rewards = {agent: float(actions[agent] == self._cues[agent]) for agent in acting}
        last = self.possible_agents[0]
        ends = {agent: self._step >= self.length - self.possible_agents.index(agent) for agent in acting}
        if self.late and self._step == 1 and not all(ends.values()):
            self.agents.append(self.possible_agents[-1])
        observations = self._observe()
        self.agents = [agent for agent in self.agents if not ends.get(agent, False)]
        terminated = {agent: ended and agent != last for agent, ended in ends.items()}
        truncated = {agent: ended and agent == last for agent, ended in ends.items()}
        return observations, rewards, terminated, truncated, {agent: {"step": self._step} for agent in acting}

    def _shape(self, agent: str) -> tuple[int]:
        return ((1 + agent.startswith("guide")) * self.cues,)

    def _observe(self) -> ByAgent:
        self._cues = {agent: int(self._random.integers(self.cues)) for agent in self.agents}
        return {agent: self._observation(agent) for agent in self.agents}

    def _observation(self, agent: str) -> NDArray[np.float32]:
        seen = np.zeros(self._shape(agent), np.float32)
        seen[self._cues[agent]] = 1
        if agent.startswith("guide") and "agent_0" in self._cues:
            seen[self.cues + self._cues["agent_0"]] = 1
        return seen


class Nim:
    """Two players take one to three sticks in turn; who takes the last one wins (reward 1, the other one −1).

    The player whose turn it is not has a mask that allows nothing. Who is to move with a number of sticks that is not a
    multiple of 4 wins by leaving one. ``sticks`` is the largest number at the start, which is random.
    """

    possible_agents = ("player_0", "player_1")

    def __init__(self, sticks: int = 9) -> None:
        if sticks < 1:
            raise ValueError(f"sticks is {sticks}, but must be at least 1")
        self.sticks = sticks
        self._left, self._turn = 0, 0

    def observation_space(self, agent: str) -> spaces.Dict:
        """Return the space of the number of sticks left, one-hot, with whose turn it is, and of the mask."""
        seen = spaces.Box(0, 1, (self.sticks + 2,), np.float32)
        return spaces.Dict({"observation": seen, "action_mask": spaces.MultiBinary(3)})

    def action_space(self, agent: str) -> spaces.Discrete:
        """Return the space of the number of sticks to take, minus 1."""
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: ByAgent | None = None) -> tuple[ByAgent, ByAgent]:
        """Begin a game; player_0 moves first."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._left, self._turn = int(self._random.integers(1, self.sticks + 1)), 0
        return self._observe(), {agent: {} for agent in self.possible_agents}

    def step(self, actions: ByAgent) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Let the player whose turn it is take sticks."""
        mover = self.possible_agents[self._turn]
        taken = int(actions[mover]) + 1
        if taken > self._left:
            raise ValueError(f"{mover} takes {taken} of {self._left} sticks")
        self._left -= taken
        over = self._left == 0
        rewards = {agent: (1.0 if agent == mover else -1.0) if over else 0.0 for agent in self.possible_agents}
        self._turn = 1 - self._turn
        flags = dict.fromkeys(self.possible_agents, over)
        infos: ByAgent = {agent: {} for agent in self.possible_agents}
        return self._observe(), rewards, flags, dict.fromkeys(self.possible_agents, False), infos

    def _observe(self) -> ByAgent:
        seen: ByAgent = {}
        for number, agent in enumerate(self.possible_agents):
            turn = number == self._turn
            observation = np.zeros(self.sticks + 2, np.float32)
            observation[self._left], observation[-1] = 1, turn
            seen[agent] = {
                "observation": observation,
                "action_mask": (np.arange(1, 4) <= self._left * turn).astype(np.int8),
            }
        return seen
