"""Rows of single agents from environments in the joint layout (environments/multiagent.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ludus.core.environment import DEFAULT_ROLE, EnvironmentManager, Role
from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs, is_mask, mask_name
from ludus.core.step import EnvStep, Episode
from ludus.core.types import State, Tensors
from ludus.environments.multiagent import ABSENT, ACTIVE, ENTERED, REWARD, STATE, STATUS, TERMINATED, TRUNCATED
from ludus.managers.base import BatchManager

ACTION = "action"  # name of an action that is not a Dict


def agents_of(observation: Specs) -> list[str]:
    """Return the agents of environments in the joint layout; none if they have a single agent."""
    return list(dict.fromkeys(spec.result_of for spec in observation.values() if spec.result_of))


def refuse_unowned(joint: BatchManager, agents: Sequence[str]) -> None:
    """Refuse observations that belong to no agent, such as those that a wrapper adds."""
    for name, spec in joint.observation.items():
        if not (spec.result_of or is_mask(name) or name == STATE or name.partition("/")[0] in agents):
            raise UserError(
                f'{joint.name}: the observation "{name}" belongs to no agent, so it cannot be divided among them; '
                "remove the wrapper, or previous_action and previous_reward from preprocess.observation."
            )


class AgentRows:
    """The rows of some agents, which observe and do the same things: n·e to n·(e + 1) are those of environment e."""

    def __init__(self, joint: BatchManager, agents: Sequence[str], role: str = DEFAULT_ROLE) -> None:
        self.agents = list(agents)
        named = [_names(joint, agent) for agent in agents]
        for names in named:
            _refuse_difference(joint, role, named[0], names)
        _, observed, acts = named[0]
        self._observed = {name: [names.observation[name] for names in named] for name in observed}
        self._acts = {name: [names.action[name] for names in named] for name in acts}
        observation = {name: _renamed(joint.observation[full], agents[0]) for name, full in observed.items()}
        if STATE in joint.observation:
            self._observed[STATE] = [STATE] * len(agents)
            observation[STATE] = joint.observation[STATE]
        self.role = Role(observation, {name: joint.action[full] for name, full in acts.items()}, len(agents))

    def divide(self, step: EnvStep) -> EnvStep:
        """Return a step of environments in rows of single agents.

        A row is real where its agent was in the world when the step began, and padding while it is absent. It begins
        an episode at the reset of its world, or where its agent enters later.
        """
        status, first = self._stack(step, STATUS), step.first.unsqueeze(1)
        stays, entered = status == ACTIVE, status == ENTERED
        real = step.real.unsqueeze(1) & ~entered & (status != ABSENT)
        terminated = real & ((status == TERMINATED) | (stays & step.terminated.unsqueeze(1)))
        truncated = real & ((status == TRUNCATED) | (stays & step.truncated.unsqueeze(1)))
        observation = {
            name: torch.stack([step.observation[full] for full in fulls], 1).flatten(0, 1)
            for name, fulls in self._observed.items()
        }
        reward = torch.where(real, self._stack(step, REWARD), 0.0)
        flags = (reward, terminated, truncated, first | entered, real)
        reward, terminated, truncated, first, real = (x.flatten() for x in flags)
        return EnvStep(observation, reward, terminated, truncated, first, real)

    def absent(self, step: EnvStep) -> Tensor:
        """Return which agents are not in the world, ``[B, n]``."""
        return self._stack(step, STATUS) == ABSENT

    def join(self, actions: Tensors) -> Tensors:
        """Return what rows have by action name, ``[B·n, …]``, by their names in the joint layout, ``[B, …]``."""
        joint: Tensors = {}
        for name, x in actions.items():
            joint |= dict(zip(self._acts[name], self.fold(x).unbind(1), strict=True))
        return joint

    def join_transform(self, action_transform: Mapping[str, str]) -> dict[str, str]:
        """Return an agent's ``action_transform`` by names in the joint layout."""
        return {full: kind for name, kind in action_transform.items() for full in self._acts[name]}

    def fold(self, x: Tensor) -> Tensor:
        """Return a tensor of rows ``[B·n, …]`` as ``[B, n, …]``."""
        return x.reshape(-1, len(self.agents), *x.shape[1:])

    def _stack(self, step: EnvStep, kind: str) -> Tensor:
        return torch.stack([step.observation[f"{kind}/{agent}"] for agent in self.agents], 1)


class RolesManager(EnvironmentManager):
    """Divides environments in the joint layout into the rows of one or more roles, given as agents by role.

    ``batch`` is the number of environments. With a single role it is an EnvironmentManager of that role, whose
    ``observation`` and ``action`` are those of one agent.
    """

    def __init__(self, joint: BatchManager, parts: Mapping[str, AgentRows]) -> None:
        self.joint, self.parts = joint, dict(parts)
        self.name, self.batch, self.groups, self.backend = joint.name, joint.batch, joint.groups, joint.backend
        self.full_reset = joint.full_reset
        self.observation, self.action, _ = next(iter(parts.values())).role
        joint.on_warning = lambda text: self.on_warning(text)

    @property
    def roles(self) -> Mapping[str, Role]:
        return {role: part.role for role, part in self.parts.items()}

    def reset_roles(self, seed: int) -> dict[str, EnvStep]:
        return self._divide(self.joint.reset(seed))

    def send_roles(self, actions: dict[str, Tensors], group: int = 0) -> None:
        joint: Tensors = {}
        for role, part in self.parts.items():
            joint |= part.join(actions[role])
        self.joint.send(joint, group)

    def recv_roles(self, group: int = 0) -> dict[str, EnvStep]:
        return self._divide(self.joint.recv(group))

    def last_roles(self) -> dict[str, EnvStep]:
        return self._divide(self.joint.last_step())

    def count_real(self, steps: dict[str, EnvStep]) -> int:
        """Count the environments in which the step of some agent was real."""
        real = [self.parts[role].fold(step.real) for role, step in steps.items()]
        return int(torch.cat(real, 1).any(1).sum())

    def _divide(self, step: EnvStep) -> dict[str, EnvStep]:
        return {role: part.divide(step) for role, part in self.parts.items()}

    def set_action_transform(self, action_transform: Mapping[str, str]) -> None:
        """Set it by names in the joint layout, or of the only role."""
        if not action_transform.keys() <= self.joint.action.keys():
            (part,) = self.parts.values()
            action_transform = part.join_transform(action_transform)
        self.joint.set_action_transform(action_transform)

    def reset(self, seed: int) -> EnvStep:
        (step,) = self.reset_roles(seed).values()
        return step

    def send(self, actions: Tensors, group: int = 0) -> None:
        (role,) = self.parts
        self.send_roles({role: actions}, group)

    def recv(self, group: int = 0) -> EnvStep:
        (step,) = self.recv_roles(group).values()
        return step

    def last_step(self) -> EnvStep:
        (step,) = self.last_roles().values()
        return step

    def episodes(self) -> list[Episode]:
        return self.joint.episodes()

    @property
    def nb_calls(self) -> int:  # type: ignore[override]
        """Steps and resets of a group so far."""
        return self.joint.nb_calls

    @property
    def longest_call(self) -> float:  # type: ignore[override]
        """Seconds of the longest of them."""
        return self.joint.longest_call

    @property
    def restored(self) -> str:  # type: ignore[override]
        """How ``load_state_dict`` restored the environments."""
        return self.joint.restored

    def current_call(self) -> tuple[int, ...] | None:
        return self.joint.current_call()

    def close(self) -> None:
        self.joint.close()

    def state_dict(self) -> State:
        return self.joint.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.joint.load_state_dict(state)


class _Names(NamedTuple):
    """The names of an agent's observations and actions in the joint layout, by those of a single agent."""

    agent: str
    observation: dict[str, str]
    action: dict[str, str]


def _names(joint: BatchManager, agent: str) -> _Names:
    actions = {
        name.removeprefix(f"{agent}/") if name != agent else ACTION: name
        for name in joint.action
        if name == agent or name.startswith(f"{agent}/")
    }
    observations = {
        name.removeprefix(f"{agent}/"): name
        for name in joint.observation
        if name.startswith(f"{agent}/") and not is_mask(name)
    }
    own = {name: joint.action[full] for name, full in actions.items()}
    masks = {mask_name(name, own): mask_name(full, joint.action) for name, full in actions.items()}
    observations |= {name: full for name, full in masks.items() if full in joint.observation}
    return _Names(agent, observations, actions)


def _renamed(spec: Spec, agent: str) -> Spec:
    """Return the spec of an agent's observation without the agent's name."""
    return spec if spec.masks is None else replace(spec, masks=spec.masks.removeprefix(f"{agent}/"))


def _refuse_difference(joint: BatchManager, role: str, first: _Names, other: _Names) -> None:
    """Refuse agents that observe or do different things under one policy."""
    for kind in ("observation", "action"):
        specs: Specs = getattr(joint, kind)
        mine, its = (
            {name: _renamed(specs[full], names.agent) for name, full in getattr(names, kind).items()}
            for names in (first, other)
        )
        for name in mine | its:
            if mine.get(name) == its.get(name):
                continue
            a, b, whose = first.agent, other.agent, f' of role "{role}"' if role != DEFAULT_ROLE else ""
            raise UserError(
                f'{joint.name}: the agents {a} and {b} share a policy{whose}, but the {kind} "{name}" of {a} is '
                f"{_describe(mine.get(name))}, and that of {b} is {_describe(its.get(name))}; give them different "
                "roles, as in --roles each, or let them learn together by maddpg (vdn or qmix for teams)."
            )


def _describe(spec: Spec | None) -> str:
    if spec is None:
        return "missing"
    choices = f" with {', '.join(map(str, dict.fromkeys(spec.sizes)))} choices" if spec.sizes else ""
    bounds = f" from {spec.low} to {spec.high}" if spec.kind == "continuous" and len(str(spec.low)) < 20 else ""
    return f"{spec.kind} of shape {spec.shape}{choices}{bounds}"
