"""Acting in numpy applies only where every class and method on the way is ours and no hook waits for a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agents_setup import make_worker
from torch import Tensor, nn

from ludus.agents.ddpg import DDPG
from ludus.agents.dqn import DQN
from ludus.agents.ppo import PPO
from ludus.agents.sac import SAC
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shapes
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import Tensors
from ludus.networks.policy import Policy


class Last(Policy):
    """Always takes choice 1."""

    def sample(self, outputs: Tensors, observation: Tensors, noise: Tensors | None) -> tuple[Tensors, Tensor]:
        actions, log_prob = super().sample(outputs, observation, noise)
        return {name: torch.ones_like(x) for name, x in actions.items()}, log_prob


class WithOwnPolicy(PPO):
    @staticmethod
    def make_policy(action: Specs, config: Any, inputs: Shapes) -> Policy:
        return Last(action)


class PPOActs(PPO):
    def _act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> AgentStep:
        said = super()._act(step, state, noise)
        return said._replace(action={name: torch.ones_like(x) for name, x in said.action.items()})


class DQNRuns(DQN):
    def run(self, *given: Any, **more: Any) -> tuple[Tensors, HiddenState]:
        outputs, state = super().run(*given, **more)
        return {name: x * 0 + torch.tensor([0.0, 1.0]) for name, x in outputs.items()}, state


class DQNActs(DQN):
    def _act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> AgentStep:
        said = super()._act(step, state, noise)
        return said._replace(action={name: torch.ones_like(x) for name, x in said.action.items()})


class SACRuns(SAC):
    def run(self, *given: Any, **more: Any) -> tuple[Tensors, HiddenState]:
        outputs, state = super().run(*given, **more)
        return {name: torch.ones_like(x) for name, x in outputs.items()}, state


class DDPGActs(DDPG):
    def _act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> tuple[Tensor, HiddenState]:
        action, state = super()._act(step, state, noise)
        return torch.ones_like(action), state


CASES = [
    ("CartPole-v1", WithOwnPolicy),
    ("CartPole-v1", PPOActs),
    ("CartPole-v1", DQNRuns),
    ("CartPole-v1", DQNActs),
    ("Pendulum-v1", SACRuns),
    ("Pendulum-v1", DDPGActs),
]


@pytest.mark.parametrize(("environment", "kind"), CASES)
def test_a_subclass_that_acts_in_its_own_way_does(environment: str, kind: type) -> None:
    worker = make_worker(environment, f"{__name__}:{kind.__name__}", nb_step=10_000)
    step = worker.manager.reset(0)
    assert not worker.agent.use_numpy()
    action = worker.agent.act(step, worker.agent.initial_state(4)).action["action"]
    assert bool((action.float() == 1).all())
    worker.close()


@pytest.mark.parametrize(
    ("environment", "agent"),
    [("CartPole-v1", "ppo"), ("CartPole-v1", "dqn"), ("Pendulum-v1", "sac"), ("Pendulum-v1", "ddpg")],
)
def test_hooks_are_called_whenever_they_are_registered(environment: str, agent: str) -> None:
    worker = make_worker(environment, agent, nb_step=10_000)
    made: Any = worker.agent
    step, state, seen = worker.manager.reset(0), made.initial_state(4), []
    assert made.use_numpy()
    before = made.act(step, state).action
    network = made.networks["q" if agent == "dqn" else "actor"]
    for module in (network, network.plain_mlp(), next(iter(network.projections.values())), made.preprocess):
        hook = module.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(made.act(step, state).action, before)
        hook.remove()
    assert len(seen) == 4
    hook = nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append(1))
    made.act(step, state)
    hook.remove()
    assert len(seen) > 4
    count = len(seen)
    torch.testing.assert_close(made.act(step, state).action, before)
    assert len(seen) == count
    worker.close()
