"""Evaluation on separate environments and seeds, without side effects on training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from ludus.core.agent import Actor
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.core.types import State
from ludus.parallel.orphans import StartedProcesses

# steps without a finished episode after which an evaluation warns, and after which it is refused
LONG, LONGEST = 5_000, 50_000


class Evaluation(NamedTuple):
    """The returns and lengths of finished episodes, and the means of the infos that all of them end with."""

    returns: list[float]
    lengths: list[int]
    infos: Mapping[str, float] = MappingProxyType({})

    def __repr__(self) -> str:
        return f"Evaluation(mean={self.mean:g}, std={self.std:g}, episodes={len(self.returns)})"

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


class Finished(NamedTuple):
    """An episode of an evaluation."""

    step: int  # number of the evaluation's step in which it ended
    row: int
    reward: float
    length: int
    infos: Mapping[str, float]


def summarize(finished: Iterable[Finished]) -> Evaluation:
    """Return the returns and lengths in the order in which the episodes ended, whichever process played them."""
    ordered = sorted(finished, key=lambda episode: (episode.step, episode.row))
    names = [name for name in ordered[0].infos if all(name in episode.infos for episode in ordered)]
    infos = {name: float(np.mean([episode.infos[name] for episode in ordered])) for name in names}
    return Evaluation([episode.reward for episode in ordered], [episode.length for episode in ordered], infos)


class Evaluator:
    """Plays a set number of episodes, the same number in each row, so that short episodes are not over-represented.

    With ``rows``, it plays only the episodes of these rows of the evaluation, as one of several processes. Its
    environments are created on first use, and again for each evaluation unless a reset clears all their state.
    Episodes may have ``limit`` steps (env.max_episode_steps) if that is more than LONGEST.
    """

    def __init__(
        self,
        make: Callable[[], EnvironmentManager],
        episodes: int,
        seed: int,
        greedy: bool = True,
        rows: Rows | None = None,
        limit: int = 0,
    ) -> None:
        self.episodes, self.seed, self.greedy, self.rows, self.limit = episodes, seed, greedy, rows, limit
        self._warned = bool(limit)  # of long episodes, which a limit says to expect
        self.round = 0  # evaluations so far: each has other seeds
        self._make = make
        self.wrap: Callable[[EnvironmentManager], EnvironmentManager] = lambda manager: manager  # around what it makes
        self._manager: EnvironmentManager | None = None
        self._longest_call = 0.0  # longest call of closed managers
        self._started = StartedProcesses()  # child processes of the environments
        self.on_warning: Callable[[str], object] | None = None  # as the manager's

    @property
    def manager(self) -> EnvironmentManager:
        """The environments of evaluation."""
        if self._manager is None:
            self._manager = self.wrap(self._make())
            self._manager.on_warning = self.on_warning or self._manager.on_warning
        return self._manager

    def run(self, agent: Actor, device: torch.device, stop: Callable[[], object] = lambda: None) -> Evaluation | None:
        """Evaluate the agent; None if ``stop`` returned true before the end."""
        finished = self.play(agent, device, stop)
        return None if finished is None else summarize(finished)

    def play(
        self, agent: Actor, device: torch.device, stop: Callable[[], object] = lambda: None
    ) -> list[Finished] | None:
        """Play the episodes and return them in the order in which they ended; None if ``stop`` returned true."""
        modes = [(module, module.training) for module in agent.modules()]
        agent.eval()
        try:
            with self._started:
                return self._play(agent, device, stop)
        finally:
            for module, mode in modes:
                module.training = mode
            if self._manager is not None and not self._manager.full_reset:
                self.close()

    def _play(self, agent: Actor, device: torch.device, stop: Callable[[], object]) -> list[Finished] | None:
        manager = self.manager
        rows = self.rows or Rows.all(manager.batch)
        quota = [self.episodes // rows.total + (row < self.episodes % rows.total) for row in range(*rows[:2])]
        entropy = np.random.SeedSequence([self.seed, self.round]).generate_state(2)
        generator = torch.Generator(device).manual_seed(int(entropy[1]))
        noise = None if self.greedy else agent.make_noise(Rows.all(rows.total), generator)
        # Some rows: the agent acts on a batch of all of them, the others being copies, because the last digits of a
        # matrix product depend on the size of the batch.
        copies = None if rows.size == rows.total else (torch.arange(rows.total) - rows.start) % rows.size
        step, state = manager.reset(int(entropy[0])), agent.initial_state(rows.total)
        finished: list[Finished] = []
        count, last = 0, 0  # steps so far, and at the last counted episode
        longest = max(LONGEST, self.limit + 1)  # with the reset between two episodes
        while count - last < longest:
            count += 1
            step = (step if copies is None else step.rows(copies)).to(device)
            agent_step = agent.act(step, state, noise.next() if noise else None)
            action, state = agent_step.action, agent_step.state
            step = manager.step(action if copies is None else {name: x[rows.slice] for name, x in action.items()})
            for episode in manager.episodes():
                if quota[episode.row]:
                    quota[episode.row] -= 1
                    last = count
                    row = rows.start + episode.row
                    finished.append(Finished(count, row, episode.reward, episode.length, episode.infos))
            if not any(quota):
                return finished
            if stop():
                return None  # the next evaluation plays the same episodes
            if count - last == LONG and not self._warned:
                self._warned = True
                manager.on_warning(
                    f"No episode of an evaluation has ended in {LONG:,} steps, and it goes on for up to {longest:,}; "
                    "if episodes have no end, set env.max_episode_steps to the length at which one may be cut."
                )
        raise UserError(
            f"An evaluation had unfinished episodes after {longest:,} steps; set env.max_episode_steps to the "
            "length at which an episode may be cut."
        )

    def current_call(self) -> tuple[int, ...] | None:
        """As the manager's."""
        manager = self._manager  # called by another thread; may be closed meanwhile
        return None if manager is None else manager.current_call()

    @property
    def longest_call(self) -> float:
        """Seconds of the longest step or reset so far."""
        return self._longest_call if self._manager is None else max(self._longest_call, self._manager.longest_call)

    def close(self) -> None:
        """Close the environments and end the processes that they started; may be called twice."""
        manager, self._longest_call, self._manager = self._manager, self.longest_call, None
        try:
            if manager is not None:
                manager.close()
        finally:
            self._started.end()
            self._started = StartedProcesses()

    def state_dict(self) -> State:
        """Return the number of evaluations."""
        return {"round": self.round}

    def load_state_dict(self, state: State) -> None:
        """Restore it."""
        if type(state["round"]) is not int or state["round"] < 0:
            raise ValueError("the number of evaluations is invalid")
        self.round = state["round"]
