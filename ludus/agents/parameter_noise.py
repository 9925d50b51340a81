"""Parameter noise of agents: of those that learn from rollouts and of those with a replay buffer.

The former (PPO, V-trace, ACER) correct for what another policy than the learned one did: the log-probability of an
action is that of the perturbed policy. Values and hidden states are those of the networks themselves, from which the
learner goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ludus.core.batch import Batch
from ludus.core.hidden_state import HiddenState
from ludus.core.types import SumOverRanks, Tensors
from ludus.core.updater import Updater
from ludus.exploration.parameter_noise import ADAPT_EVERY, SEED, SIGMA, ParameterNoise
from ludus.ops.policy_gradient import share_sum, shares

if TYPE_CHECKING:
    from ludus.agents.actor_critic import ActorCritic
    from ludus.agents.off_policy import OffPolicy


def add_parameter_noise(agent: ActorCritic, target: float) -> None:
    """Explore by noise on the parameters of the policy's network, if ``target`` is not 0."""
    if target:
        agent.parameter_noise = ParameterNoise(agent.networks[_policy_network(agent)], SIGMA)
        agent.generator = agent.generator or torch.Generator()


def perturbed_outputs(
    agent: ActorCritic, observation: Tensors, state: HiddenState, first: Tensor, noise: Tensors
) -> Tensors:
    """Return the policy's outputs by the perturbed network for one step ``[1, B, …]``; an episode may resample it."""
    assert agent.parameter_noise is not None
    agent.parameter_noise.resample_on_reset(first[0], noise[SEED])
    return _policy_outputs(agent, agent.parameter_noise.perturbed, observation, state, first)


@torch.no_grad()
def adapt_to_kl(agent: ActorCritic, batch: Batch, sum_over_ranks: SumOverRanks) -> None:
    """Adapt the scale of the noise to the KL of the policy and the perturbed one on a rollout."""
    noise, policy = agent.parameter_noise, agent.policy
    assert noise is not None
    assert agent.generator is not None
    rows = batch.without_last_observation()
    share = shares(rows.real.to(rows.reward.dtype), sum_over_ranks=sum_over_ranks)
    given = rows.observation, rows.state, rows.first

    def distance(perturbed: nn.Module) -> Tensor:
        plain = _policy_outputs(agent, agent.networks[_policy_network(agent)], *given)
        old = policy.distribution(plain, rows.action, rows.observation)
        kl = policy.kl(old, _policy_outputs(agent, perturbed, *given), rows.action, rows.observation)
        return sum_over_ranks(share_sum(kl, share))

    noise.target = agent.config.parameter_noise
    noise.adapt(noise.measure(agent.generator, distance))


def _policy_network(agent: ActorCritic) -> str:
    return "actor" if "actor" in agent.networks else "actor_critic"


def _policy_outputs(
    agent: ActorCritic, network: nn.Module, observation: Tensors, state: HiddenState, first: Tensor
) -> Tensors:
    """Return the policy's outputs by ``network``, the one of the policy or its perturbed copy."""
    own = state.select(_policy_network(agent)) if state else state
    given, _ = network(agent.inputs(observation), own, first)
    return {name: x for name, x in given.items() if name in agent.policy.outputs}


def adapt_to_distance(agent: OffPolicy, batch: Batch, updater: Updater) -> None:
    """Adapt the scale of the noise, every ``ADAPT_EVERY`` updates, to what it does to the actions of a batch."""
    if agent.updates % ADAPT_EVERY:
        return
    name, first, noise = agent.acting[0], batch.first[:-1], agent.parameter_noise
    assert noise is not None

    def distance(perturbed: nn.Module) -> Tensor:
        inputs = {key: x[:-1] for key, x in agent.inputs(batch.observation).items()}
        plain, other = (agent.run(name, inputs, batch.state, first, network=x)[0] for x in (None, perturbed))
        return agent.perturbed_distance(batch, plain, other, updater.sum)

    noise.adapt(noise.measure(agent.generator, distance))
