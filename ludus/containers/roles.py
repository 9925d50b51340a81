"""Training with several roles: agents of one world with a policy each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ludus.containers.build import (
    Engines,
    adapt_to_environment,
    agents_per_environment,
    build_agent,
    build_cache,
    build_learner,
    choose_engines,
    divide_environments,
    make_actor,
    outline_agent,
)
from ludus.containers.evaluate import Evaluator
from ludus.containers.guard import Guard
from ludus.containers.hook import OnUpdate
from ludus.containers.local import LocalWorker
from ludus.containers.loop import improve, set_scheduled
from ludus.containers.team import Team
from ludus.containers.updater import LocalUpdater
from ludus.core.agent import Actor, Agent
from ludus.core.cache import ExperienceCache
from ludus.core.environment import EnvironmentManager
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.seat import Seat
from ludus.core.step import Episode
from ludus.core.types import State, Tensors
from ludus.logging.clock import Clock
from ludus.managers.base import BatchManager
from ludus.managers.roles import RolesManager
from ludus.networks.placement import device_of
from ludus.preprocess.rewards import make_reward_ops
from ludus.settings.settings import Resolved, RolesConfig, Settings, to_flat


class RoleUpdaters(dict[str, LocalUpdater]):
    """The updater of each role."""


class RoleLearner:
    """The agent of one role with its seat, cache, updater and guard; what ``improve`` needs."""

    def __init__(self, seat: Seat, cache: ExperienceCache, updater: LocalUpdater, guard: Guard, clock: Clock) -> None:
        self.seat, self.cache, self.updater, self.guard, self.clock = seat, cache, updater, guard, clock
        self.scheduled: Mapping[str, float] = {}

    def schedule(self, progress: float) -> None:
        """Set scheduled values from the progress of the run (0 to 1)."""
        self.scheduled = set_scheduled(self.seat.agent, self.cache, self.updater, progress)

    def progress(self) -> dict[str, float]:
        """Return schedules and metrics of the cache."""
        return {**self.scheduled, "learning_rate": self.updater.learning_rate, **self.cache.metrics()}


class RolesWorker(LocalWorker):
    """A LocalWorker with a seat for each role; all collect in the same environments, then each learns from its cache.

    Its ``agent`` is the team of all roles. What there is one of for each role has the role as prefix or key: metrics,
    and updater, cache, random numbers and hidden state in checkpoints.
    """

    keeps_failures = False  # ludus diagnose recomputes the update of a single agent

    def __init__(
        self,
        settings: Settings[Any],
        agent: Team,
        manager: RolesManager,
        updater: RoleUpdaters,
        evaluator: Evaluator,
        on_update: OnUpdate | None = None,
    ) -> None:
        self.updaters, self.learners = updater, dict[str, RoleLearner]()
        self.metrics: Tensors = {}  # of the last update of each role, which are not at the same time
        first: Any = agent  # LocalWorker calls only what a team has too
        super().__init__(settings, first, manager, next(iter(updater.values())), evaluator, on_update)
        for learner in self.learners.values():
            learner.clock = self.clock

    def _make_cache(self, rows: Rows, noise_seed: int) -> ExperienceCache:
        """Make the cache, the seat and the guard of each role; return the cache of the first."""
        assert isinstance(self.manager, RolesManager)
        environments, self.seats = Rows.all(self.manager.batch), []
        for number, (role, part) in enumerate(self.manager.parts.items()):
            agent: Any = self.agent.actor(role)  # type: ignore[operator]
            rows, device = environments.times(len(part.agents)), device_of(agent)
            noise = agent.make_noise(rows, torch.Generator(device).manual_seed(noise_seed + number))
            rewards = make_reward_ops(self.settings.preprocess.reward)
            cache = build_cache(agent, self.manager, rows, rewards)
            cache.on_warning = lambda text: self.manager.on_warning(text)
            seat = Seat(agent, cache, noise, rows, device, role=role, preprocess_reward=rewards)
            guard = Guard(agent, self.updaters[role], self.manager, part.role)
            self.learners[role] = RoleLearner(seat, cache, self.updaters[role], guard, Clock())
            self.seats.append(seat)
        self.seat = self.seats[0]
        return next(iter(self.learners.values())).cache

    def _make_guard(self) -> Guard:
        return next(iter(self.learners.values())).guard

    def _seed_generators(self, seeds: list[int], start: int) -> None:
        for number, learner in enumerate(self.learners.values()):
            for generator, seed in zip((learner.seat.agent.generator, learner.cache.generator), seeds, strict=True):
                if generator is not None:
                    generator.manual_seed(seed + number)

    @classmethod
    def make_updater(cls, agent: Any, settings: Settings[Any]) -> Any:
        """Make the updater of each role of a team."""
        return RoleUpdaters({role: LocalUpdater(agent.actor(role)) for role in agent.parts})

    def _schedule(self, progress: float) -> None:
        for learner in self.learners.values():
            learner.schedule(progress)

    def _use_return(self, mean: float) -> None:
        for learner in self.learners.values():
            learner.updater.add_return(mean)

    def _improve(self, step: int) -> tuple[Tensors, int]:
        """Let every role learn from its cache, in order."""
        count = 0
        for role, learner in self.learners.items():
            learner.guard.step = step
            found, updates = improve(learner)
            self.metrics |= {f"{role}/{name}": x.detach() for name, x in found.items()}
            count += updates
        return dict(self.metrics), count

    def progress(self) -> dict[str, float]:
        """Return the metrics of the loop, those of each role with its name before them."""
        own = {f"{role}/{k}": x for role, learner in self.learners.items() for k, x in learner.progress().items()}
        return {**own, "updates": float(self.updates), **self.episodes.means()}

    def _episode_warning(self, episodes: list[Episode]) -> str:
        return ""  # the episodes are those of whole worlds

    @property
    def diverged(self) -> bool:
        """Whether the training of a role ended at a loss or gradient that is not finite."""
        return any(learner.guard.diverged for learner in self.learners.values())

    def _updater_state(self) -> State:
        return {role: updater.state_dict() for role, updater in self.updaters.items()}

    def _load_updater(self, state: State) -> None:
        for role, updater in self.updaters.items():
            updater.load_state_dict(state[role])

    def _cache_state(self, whole: bool) -> State | None:
        return {role: learner.cache.state_dict() for role, learner in self.learners.items()} if whole else None

    def _collector_state(self, whole: bool) -> State:
        seats = {seat.role: seat for seat in self.seats}
        return super()._collector_state(whole) | {
            "metrics_of_roles": dict(self.metrics),
            "noise": {role: seat.noise.state_dict() for role, seat in seats.items()},
            "hidden_state": {role: dict(seat.hidden_state) for role, seat in seats.items()},
        }

    def _load_seats(self, state: State) -> None:
        self.metrics = dict(state["metrics_of_roles"])
        for role, learner in self.learners.items():
            learner.seat.noise.load_state_dict(state["noise"][role])
            if state["cache"] is not None:
                learner.cache.load_state_dict(state["cache"][role])

    def _continue_seats(self, state: State) -> None:
        last = self.manager.last_roles()
        for role, learner in self.learners.items():
            seat = learner.seat
            step = seat.env_step = last[role].to(seat.device)
            learner.cache.amend(step)
            saved = HiddenState(state["hidden_state"][role])
            seat.hidden_state = saved.map(lambda x, device=seat.device: x.to(device))  # type: ignore[misc]


def adapt_to_manager(resolved: Resolved, manager: EnvironmentManager) -> Resolved:
    """Adapt settings to the environment; with several roles, decide all settings of each."""
    settings = resolved.settings
    if not settings.roles.agents or not isinstance(manager, RolesManager):
        agents = 1 if settings.self_play.every else agents_per_environment(manager)  # a row is one player of a game
        return adapt_to_environment(resolved, manager.observation, manager.action, agents)
    names = {role: settings.for_role(role).agent_name for role in manager.parts}
    members = {role: part.agents for role, part in manager.parts.items()}
    if settings.roles.each:  # recorded as explicit roles, so that a resume knows their settings
        explicit = RolesConfig(agents=_pairs(names), members=_pairs({role: who[0] for role, who in members.items()}))
        settings = replace(settings, roles=explicit)
    given = settings.per_role
    for role, part in manager.parts.items():
        own = settings.for_role(role, len(part.agents))
        flags = {f"{table}.{name}" for table, values in given.get(role, {}).items() for name in values}
        origins = {key: "flag" if key in flags else "default" for key in to_flat(own)}
        if own.agent_name == settings.agent_name:
            origins |= {key: resolved.origins[key] for key in origins if key not in flags and key in resolved.origins}
        fixed = dict.fromkeys(("evaluation.every", "checkpoint_every"), "flag")  # those of the run
        adapted = adapt_to_environment(
            Resolved(own, origins | fixed), part.role.observation, part.role.action, len(part.agents)
        )
        settings = settings.with_role(role, adapted.settings)
    before = to_flat(resolved.settings)
    changed = {key: "chosen" for key, value in to_flat(settings).items() if before.get(key) != value}
    return Resolved(settings, resolved.origins | changed)


def _pairs(pairs: Mapping[str, str]) -> str:
    return ", ".join(f"{role}={value}" for role, value in pairs.items())


def build_learners(resolved: Resolved, manager: EnvironmentManager, device: str, new: bool = True) -> Agent | Team:
    """Build the agent that a run trains, or the team of the agents of all roles."""
    settings = resolved.settings
    if not settings.roles.agents or not isinstance(manager, RolesManager):
        return build_learner(resolved, manager.observation, manager.action, device, new)
    agents = {
        role: build_learner(Resolved(own, {}), *manager.roles[role][:2], device, new)
        for role, own in role_settings(settings, manager.parts).items()
    }
    return Team(agents, manager.parts)


def role_settings(settings: Settings[Any], parts: Mapping[str, Any]) -> dict[str, Settings[Any]]:
    """Return the settings of each role; networks of different roles have different initial weights."""
    return {
        role: replace(settings.for_role(role, len(part.agents)), seed=settings.seed + number)
        for number, (role, part) in enumerate(parts.items())
    }


def outline_learners(settings: Settings[Any], manager: EnvironmentManager) -> Agent | Team | None:
    """Return the agent or team with meta tensors, as ``outline_agent``."""
    if not settings.roles.agents or not isinstance(manager, RolesManager):
        return outline_agent(settings, manager.observation, manager.action)
    found = {
        role: outline_agent(own, *manager.roles[role][:2])
        for role, own in role_settings(settings, manager.parts).items()
    }
    agents = {role: agent for role, agent in found.items() if agent is not None}
    return Team(agents, manager.parts) if len(agents) == len(found) else None


def choose_all_engines(settings: Settings[Any], agent: Agent | Team) -> Engines:
    """Choose threads and engines of an agent, or of those of all roles, whose updates are not compiled."""
    if isinstance(agent, Agent):
        return choose_engines(settings, agent)
    plain = replace(settings, compile="off")
    found = [choose_engines(own, agent.actor(role)) for role, own in role_settings(plain, agent.parts).items()]  # type: ignore[arg-type]
    acting = "/".join(dict.fromkeys(engines.acting for engines in found))
    return found[0]._replace(threads=max(engines.threads for engines in found), acting=acting)


def build_player(settings: Settings[Any], joint: BatchManager, device: torch.device) -> tuple[Actor, Agent | Team]:
    """Build what plays whole environments, and the part of it that checkpoints hold."""
    manager = divide_environments(joint, settings)
    learned: Agent | Team
    if settings.roles.agents and isinstance(manager, RolesManager):
        found = role_settings(settings, manager.parts).items()
        agents = {role: build_agent(own, *manager.roles[role][:2], device) for role, own in found}
        learned = Team(agents, manager.parts)
    else:
        learned = build_agent(settings, manager.observation, manager.action, device)
    return make_actor(learned, manager), learned


def outline_player(settings: Settings[Any], joint: BatchManager) -> Agent | Team | None:
    """Return the part of what plays whole environments that checkpoints hold, with meta tensors."""
    return outline_learners(settings, divide_environments(joint, settings))
