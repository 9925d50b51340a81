"""An agent in its seat, with all that it learns with; a run has one, or one for each role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ludus.containers.build import build_cache
from ludus.containers.datasets import give_dataset
from ludus.containers.guard import Guard
from ludus.containers.roles import RolePart
from ludus.core.agent import Agent
from ludus.core.environment import DEFAULT_ROLE, EnvironmentManager
from ludus.core.errors import naming_role
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.seat import Seat
from ludus.core.step import EnvStep
from ludus.core.types import Tensors
from ludus.core.updater import Updater
from ludus.networks.placement import device_of
from ludus.preprocess.rewards import make_reward_ops
from ludus.settings.settings import Settings


class SeatLearner(RolePart):
    """An agent in its seat, with its cache, updater and guard.

    ``settings`` are those of its role, ``seeds`` those of acting, learning and sampling.
    """

    def __init__(
        self,
        settings: Settings[Any],
        agent: Agent,
        manager: EnvironmentManager,
        updater: Updater,
        rows: Rows,
        seeds: Sequence[int],
        role: str = DEFAULT_ROLE,
        prefix: str = "",
    ) -> None:
        self.settings, self.agent, self.updater, self.role, self.prefix = settings, agent, updater, role, prefix
        needs, device = manager.roles[role], device_of(agent)
        noise_seed, *own_seeds = seeds
        noise = agent.make_noise(rows, torch.Generator(device).manual_seed(noise_seed))
        rewards = make_reward_ops(settings.preprocess.reward)
        give_dataset(settings, agent, needs.observation, needs.action)
        with naming_role(role) if prefix else nullcontext():
            self.cache = build_cache(agent, manager, rows, rewards)
        self.cache.on_warning = lambda text: manager.on_warning(text)
        self.seat = Seat(agent, self.cache, noise, rows, device, role=role, preprocess_reward=rewards)
        self.guard = Guard(agent, updater, manager, needs)
        for generator, seed in zip((agent.generator, self.cache.generator), own_seeds, strict=True):
            if generator is not None:
                generator.manual_seed(seed + rows.start)  # other numbers on other ranks
        self.scheduled: Mapping[str, float] = {}  # scheduled values, for the log
        self.metrics: Tensors = {}  # of its last update, with several roles, which do not learn at the same time

    def schedule(self, progress: float) -> None:
        """Set scheduled values from the progress of the run (0 to 1)."""
        scheduled = self.agent.schedule(progress)
        self.cache.schedule(progress)
        self.updater.learning_rate = scheduled.get("learning_rate", self.updater.learning_rate)
        self.scheduled = {**scheduled, **self.updater.schedule(progress)}

    def keep(self, metrics: Tensors) -> Tensors:
        """Keep the metrics of an update by their names with the role; return those of the last update."""
        self.metrics |= self.named({name: x.detach() for name, x in metrics.items()})
        return self.metrics

    def progress(self) -> dict[str, float]:
        """Return schedules and metrics of the cache."""
        return self.named({**self.scheduled, "learning_rate": self.updater.learning_rate, **self.cache.metrics()})

    def resume_at(self, step: EnvStep, hidden_state: Tensors) -> None:
        """Continue with the last step of the environments, which were restored."""
        seat = self.seat
        seat.env_step = step.to(seat.device)
        self.cache.amend(seat.env_step)
        seat.hidden_state = HiddenState(hidden_state).map(lambda x: x.to(seat.device))
