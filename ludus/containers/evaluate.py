"""Evaluation: environments of its own, nothing of training touched."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ludus.containers.loop import place
from ludus.core.agent import Agent
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.types import State

LONGEST = 200_000  # steps of one row: an environment whose episodes never end must not hang a run


class Evaluation(NamedTuple):
    """The returns and lengths of finished episodes."""

    returns: list[float]
    lengths: list[int]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def mean_length(self) -> float:
        """Mean number of steps."""
        return float(np.mean(self.lengths))

    @property
    def std(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std(self.returns))


class Evaluator:
    """Plays a set number of fresh episodes: each row plays its share, so that short episodes are not over-counted."""

    def __init__(self, manager: EnvironmentManager, episodes: int, seed: int, greedy: bool = True) -> None:
        self.manager, self.episodes, self.seed, self.greedy = manager, episodes, seed, greedy
        self.round = 0  # evaluations done: each has seeds of its own

    def run(self, agent: Agent, device: torch.device) -> Evaluation:
        """Play with ``agent`` as it is now."""
        rows = self.manager.batch
        quota = [self.episodes // rows + (row < self.episodes % rows) for row in range(rows)]
        entropy = np.random.SeedSequence([self.seed, self.round]).generate_state(2)
        self.round += 1
        noise = None
        if not self.greedy:
            generator = torch.Generator(device).manual_seed(int(entropy[1]))
            noise = agent.make_noise(rows, generator)
        step, state = place(self.manager.reset(int(entropy[0])), device), agent.initial_state(rows)
        self.manager.episodes()
        returns, lengths = [], []
        for _ in range(LONGEST):
            said = agent.act(step, state, noise.next() if noise else None)
            step, state = place(self.manager.step(said.action), device), said.state
            for episode in self.manager.episodes():
                if quota[episode.row]:
                    quota[episode.row] -= 1
                    returns.append(episode.reward)
                    lengths.append(episode.length)
            if not any(quota):
                return Evaluation(returns, lengths)
        raise UserError(
            f"An evaluation had unfinished episodes after {LONGEST:,} steps; set env.max_episode_steps to the "
            "length at which an episode may be cut."
        )

    def close(self) -> None:
        """Close the environments."""
        self.manager.close()

    def state_dict(self) -> State:
        """How many evaluations were done."""
        return {"round": self.round}

    def load_state_dict(self, state: State) -> None:
        """Continue the count."""
        self.round = state["round"]
