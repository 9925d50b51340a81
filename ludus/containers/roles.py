"""What there is one of for each role of a run: parts of a process, settings, agents; without roles, of the agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ludus.containers.build import (
    Engines,
    adapt_to_environment,
    agents_per_environment,
    build_agent,
    build_learner,
    choose_engines,
    divide_environments,
    make_actor,
    outline_agent,
)
from ludus.containers.team import Team, members
from ludus.core.agent import Actor, Agent
from ludus.core.environment import DEFAULT_ROLE, EnvironmentManager, Role
from ludus.core.errors import naming_role
from ludus.managers.base import BatchManager
from ludus.managers.roles import RolesManager
from ludus.settings.settings import Resolved, RolesConfig, Settings, to_flat

T = TypeVar("T")
P = TypeVar("P", bound="RolePart")


class RolePart:
    """What a process has one of for each role; with a single agent the role is ``DEFAULT_ROLE`` and has no name.

    With several roles, ``prefix`` is the name of the role and a slash, for metrics and for tensors that are sent to
    other processes.
    """

    role: str
    prefix: str

    def named(self, values: Mapping[str, T]) -> dict[str, T]:
        """Return values with the role before their names."""
        return {f"{self.prefix}{name}": x for name, x in values.items()} if self.prefix else dict(values)

    def select(self, values: Mapping[str, T]) -> dict[str, T]:
        """Return the values of this role among those of all roles, by their names without the role."""
        start = len(self.prefix)
        return {name[start:]: x for name, x in values.items() if name.startswith(self.prefix)}

    def own(self, state: Any) -> Any:
        """Return the part of this role in what ``by_role`` returned."""
        return state[self.role] if self.prefix else state


def by_role(parts: Sequence[P], state: Callable[[P], Any]) -> Any:
    """Return a state of the only part, or with several roles, that of each by its name."""
    found = {part.role: state(part) for part in parts}
    return found if parts[0].prefix else found[DEFAULT_ROLE]


def adapt_to_manager(resolved: Resolved, manager: EnvironmentManager) -> Resolved:
    """Adapt settings to the environment; with several roles, decide all settings of each."""
    settings = resolved.settings
    if not settings.roles.agents or not isinstance(manager, RolesManager):
        agents = 1 if settings.self_play.every else agents_per_environment(manager)  # a row is one player of a game
        return adapt_to_environment(resolved, manager.observation, manager.action, agents)
    names = {role: settings.for_role(role).agent_name for role in manager.parts}
    first = {role: part.agents[0] for role, part in manager.parts.items()}
    if settings.roles.each:  # recorded as explicit roles, so that a resume knows their settings
        explicit = RolesConfig(agents=_pairs(names), members=_pairs(first))
        settings = replace(settings, roles=explicit)
    given = settings.per_role
    for role, part in manager.parts.items():
        own = settings.for_role(role, len(part.agents))
        flags = {f"{table}.{name}" for table, values in given.get(role, {}).items() for name in values}
        origins = {key: "flag" if key in flags else "default" for key in to_flat(own)}
        if own.agent_name == settings.agent_name:
            origins |= {key: resolved.origins[key] for key in origins if key not in flags and key in resolved.origins}
        fixed = dict.fromkeys(("evaluation.every", "checkpoint_every"), "flag")  # those of the run
        with naming_role(role):
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
    agents = {}
    for role, own in role_settings(settings, manager.roles).items():
        with naming_role(role):
            agents[role] = build_learner(Resolved(own, {}), *manager.roles[role][:2], device, new, role)
    return Team(agents, manager.parts)


def role_settings(settings: Settings[Any], roles: Mapping[str, Role]) -> dict[str, Settings[Any]]:
    """Return the settings of each role; networks of different roles have different initial weights."""
    if not settings.roles.agents:
        return {DEFAULT_ROLE: settings}
    return {
        role: replace(settings.for_role(role, needs.agents), seed=settings.seed + number)
        for number, (role, needs) in enumerate(roles.items())
    }


def outline_learners(settings: Settings[Any], manager: EnvironmentManager) -> Agent | Team | None:
    """Return the agent or team with meta tensors, as ``outline_agent``."""
    if not settings.roles.agents or not isinstance(manager, RolesManager):
        return outline_agent(settings, manager.observation, manager.action)
    found = {
        role: outline_agent(own, *manager.roles[role][:2])
        for role, own in role_settings(settings, manager.roles).items()
    }
    agents = {role: agent for role, agent in found.items() if agent is not None}
    return Team(agents, manager.parts) if len(agents) == len(found) else None


def choose_all_engines(settings: Settings[Any], agent: Agent | Team) -> Engines:
    """Choose threads and engines of an agent, or of those of all roles, whose updates are not compiled."""
    if isinstance(agent, Agent):
        return choose_engines(settings, agent)
    own = role_settings(replace(settings, compile="off"), {role: part.role for role, part in agent.parts.items()})
    found = [choose_engines(own[role], actor) for role, actor in members(agent).items()]
    acting = "/".join(dict.fromkeys(engines.acting for engines in found))
    return found[0]._replace(threads=max(engines.threads for engines in found), acting=acting)


def build_agents(settings: Settings[Any], manager: EnvironmentManager, device: torch.device | str) -> Agent | Team:
    """Build the agent of a run, or the team of the agents of all roles, without the checks of ``build_learners``."""
    if not settings.roles.agents or not isinstance(manager, RolesManager):
        return build_agent(settings, manager.observation, manager.action, device)
    own = role_settings(settings, manager.roles)
    agents = {role: build_agent(own[role], *needs[:2], device) for role, needs in manager.roles.items()}
    return Team(agents, manager.parts)


def build_player(settings: Settings[Any], joint: BatchManager, device: torch.device) -> tuple[Actor, Agent | Team]:
    """Build what plays whole environments, and the part of it that checkpoints hold."""
    manager = divide_environments(joint, settings)
    learned = build_agents(settings, manager, device)
    return make_actor(learned, manager), learned


def outline_player(settings: Settings[Any], joint: BatchManager) -> Agent | Team | None:
    """Return the part of what plays whole environments that checkpoints hold, with meta tensors."""
    return outline_learners(settings, divide_environments(joint, settings))
