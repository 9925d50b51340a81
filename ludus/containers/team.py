"""Several agents of a world as one actor, for evaluating and playing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ludus.core.agent import Actor, Agent
from ludus.core.dataset import Dataset
from ludus.core.environment import DEFAULT_ROLE
from ludus.core.hidden_state import HiddenState
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.step import AgentStep, EnvStep, Episode
from ludus.core.types import Tensors
from ludus.managers.roles import AgentRows

PREFIX = "role_"  # a ModuleDict has methods that a role may be called like


class Team(Actor):
    """Plays whole worlds in the joint layout: the actor of each role acts for the rows of its agents.

    Hidden states and random numbers are named ``<role>/…`` and have a row for each world, ``[B, n, …]``.
    """

    dataset: Dataset | None = None  # roles do not learn from recorded episodes

    def __init__(self, actors: Mapping[str, Actor], parts: Mapping[str, AgentRows]) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.actors = nn.ModuleDict({f"{PREFIX}{role}": actor for role, actor in actors.items()})
        self.recurrent = any(actor.recurrent for actor in actors.values())

    def actor(self, role: str) -> Actor:
        """Return the actor of a role."""
        return self.actors[f"{PREFIX}{role}"]  # type: ignore[return-value]

    @property
    def action_transform(self) -> Mapping[str, str]:
        """That of all roles, by names in the joint layout."""
        joined: dict[str, str] = {}
        for role, part in self.parts.items():
            joined |= part.join_transform(self.actor(role).action_transform)
        return joined

    def initial_state(self, batch: int) -> HiddenState:
        """Return the hidden states of all roles."""
        state = HiddenState()
        for role, part in self.parts.items():
            own = self.actor(role).initial_state(batch * len(part.agents))
            state.update(own.map(part.fold).with_prefix(role))
        return state

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Return random numbers for all roles, each with a generator of its own."""
        return TeamNoise(self, rows, generator)

    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Let each role act on its rows; what it remembers of an agent stays as it is while the agent is absent."""
        actions: Tensors = {}
        after = HiddenState()
        for role, part in self.parts.items():
            own = None if noise is None else HiddenState(noise).select(role).map(_unfold)
            before = state.select(role)
            done = self.actor(role).act(part.divide(step), before.map(_unfold), own)
            actions |= part.join(done.action)
            if done.state:
                new = done.state.map(part.fold).keep(part.absent(step), before.reset(step.first))
                after.update(new.with_prefix(role))
        return AgentStep(actions, {}, after)

    def value(self, step: EnvStep, state: HiddenState) -> Tensors:
        """Return the value ``[B]`` of each agent, 0 where it is absent; a role that has no agent there is not asked."""
        values: Tensors = {}
        for role, part in self.parts.items():
            absent = part.absent(step)
            found = torch.zeros(absent.shape, device=absent.device)
            if not absent.all():
                own = self.actor(role).value(part.divide(step), state.select(role).map(_unfold))
                assert isinstance(own, Tensor)
                found = part.fold(own).masked_fill(absent, 0)
            values |= dict(zip(part.agents, found.unbind(1), strict=True))
        return values

    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Return the parameters of every agent's distribution, by action name in the joint layout."""
        joined: dict[str, Tensors] = {}
        for role, part in self.parts.items():
            found = self.actor(role).distribution(part.divide(step), state.select(role).map(_unfold))
            for action, parameters in found.items():
                for name, x in parameters.items():
                    for full, own in part.join({action: x}).items():
                        joined.setdefault(full, {})[name] = own
        return joined

    def track_critic_state(self) -> None:
        """Let every role track it."""
        for role in self.parts:
            self.actor(role).track_critic_state()

    def use_numpy(self) -> bool:
        """Switch every role; return whether it was done for all."""
        return all([self.actor(role).use_numpy() for role in self.parts])

    def episode_warning(self, episodes: list[Episode]) -> str:
        """Return nothing: the episodes are those of whole worlds, not of a role."""
        return ""


def members(agent: Actor) -> dict[str, Agent]:
    """Return the agents of a team by role, or a single agent as that of the only role."""
    actors = {role: agent.actor(role) for role in agent.parts} if isinstance(agent, Team) else {DEFAULT_ROLE: agent}
    return {role: actor for role, actor in actors.items() if isinstance(actor, Agent)}


class TeamNoise(Noise):
    """The random numbers of a team, for acting without checkpoints."""

    def __init__(self, team: Team, rows: Rows, generator: torch.Generator) -> None:
        self._parts = dict(team.parts)
        self._noises: dict[str, Noise] = {}
        for role, part in team.parts.items():
            seed = int(torch.randint(2**31 - 1, (1,), generator=generator, device=generator.device))
            own = torch.Generator(generator.device).manual_seed(seed)
            self._noises[role] = team.actor(role).make_noise(rows.times(len(part.agents)), own)

    def next(self) -> Tensors:
        """Return the numbers for one step."""
        found: Tensors = {}
        for role, noise in self._noises.items():
            found |= HiddenState(noise.next()).map(self._parts[role].fold).with_prefix(role)
        return found


def _unfold(x: Tensor) -> Tensor:
    """Return ``[B, n, …]`` as rows ``[B·n, …]``."""
    return x.flatten(0, 1)
