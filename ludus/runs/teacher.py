"""A trained policy as the teacher of another agent."""

from __future__ import annotations

from typing import Any

import torch

from ludus.core.agent import Agent
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec, Specs
from ludus.core.step import EnvStep
from ludus.core.types import Tensors
from ludus.managers.roles import agents_of
from ludus.networks.placement import device_of
from ludus.preprocess.action_inverter import ActionInverter
from ludus.preprocess.actions import ActionPreprocessor
from ludus.runs.policy import Player, load
from ludus.settings.settings import Settings


def give_teacher(agent: Agent, settings: Settings[Any], manager: EnvironmentManager, trust: bool) -> None:
    """Load the policy that the agent's settings name as its teacher, if they do, and give it to the agent."""
    run = agent.teacher_run
    if not run:
        return
    if settings.container != "local":
        raise UserError(
            f"agent.teacher labels what the student meets in the training process, but container is "
            f"{settings.container}; set it to local."
        )
    player = load(run, runs=settings.runs, device=str(device_of(agent)), trust=trust)
    try:
        if agents_of(player.observation):
            raise UserError(
                f'agent.teacher is "{run}", a policy of several agents, which cannot teach; use a teacher of an '
                "environment with one agent."
            )
        agent.teacher = PolicyTeacher(player, agent, manager.observation, manager.action)
    finally:
        player.close()


class PolicyTeacher:
    """The policy of a run; its most likely actions in the policy space of the student."""

    def __init__(self, player: Player, student: Agent, observation: Specs, action: Specs) -> None:
        theirs = player.observation, player.action
        for kind, own, ours in zip(("observation", "action"), theirs, (observation, action), strict=True):
            lacks = [name for name, spec in own.items() if name not in ours or _layout(ours[name]) != _layout(spec)]
            if lacks or (kind == "action" and own.keys() != ours.keys()):
                raise UserError(
                    f'agent.teacher is "{student.teacher_run}", a policy with the {kind}s {_describe(own)}, but the '
                    f"environment has {_describe(ours)}; use a teacher of the same environment, wrappers and "
                    "preprocessing."
                )
        self._agent, self._device = player.agent, player.device
        self._to_environment = ActionPreprocessor(action, self._agent.action_transform)
        self._to_student = ActionInverter(action, student.action_transform)

    def initial_state(self, batch: int) -> HiddenState:
        """Return the hidden state of the teacher's networks."""
        return self._agent.initial_state(batch)

    def label(self, step: EnvStep, state: HiddenState) -> tuple[Tensors, HiddenState]:
        """Act greedily, and map the actions through the environment's to those of the student."""
        acted = self._agent.act(step, state)
        arrays = self._to_environment({name: x.cpu().numpy() for name, x in acted.action.items()})
        labels = self._to_student(arrays)
        return {name: torch.from_numpy(x).to(self._device) for name, x in labels.items()}, acted.state


def _layout(spec: Spec) -> tuple[Any, ...]:
    return spec.shape, spec.dtype, spec.kind, spec.sizes, spec.low, spec.high


def _describe(specs: Specs) -> str:
    return ", ".join(f"{name} {spec.kind} {spec.shape}" for name, spec in specs.items())
