"""Discrete SAC: soft actor-critic for one Discrete action, with exact expectations (Christodoulou 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ludus.agents.off_policy import CURRENT, MEAN, intermediate_observations
from ludus.agents.replay_actor_critic import at_time, noise_chunk
from ludus.agents.sac import EXCESS_ENTROPY, SoftActorCritic, SoftActorCriticConfig
from ludus.core.batch import Batch
from ludus.core.errors import check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs, is_mask, mask_name
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.exploration.parameter_noise import SEED, draw_seeds, epsilon_kl, softmax_kl
from ludus.networks.build import network_spec
from ludus.networks.value_heads import number_of_choices
from ludus.ops.distributions import categorical_sample, gumbel, mask_logits
from ludus.ops.policy_gradient import share_sum
from ludus.ops.q_learning import gather_action, policy_entropy, sac_discrete_actor_loss, sac_discrete_value


@dataclass(frozen=True)
class DiscreteSACConfig(SoftActorCriticConfig):
    """Settings of discrete SAC."""

    target_entropy: float = 0.98  # as a share of the maximum entropy; lower for a more deterministic policy

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(self, fraction=("target_entropy", "parameter_noise"))


class DiscreteSAC(SoftActorCritic):
    """A categorical policy that maximizes reward and entropy, with critics learned from a replay buffer."""

    Config: type[Any] = DiscreteSACConfig

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks)
        self.choices, (self.name,) = number_of_choices(action), action
        self.mask = mask_name(self.name, action) if any(map(is_mask, observation)) else None

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for an actor, and critics that output Q of all choices."""
        choices = number_of_choices(action)
        return {
            "actor": network_spec(observation, {"policy": (choices,)}),
            "critic": network_spec(observation, {"value": (choices,)})._replace(members=config.critics),
        }

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Draw Gumbel numbers for sampling."""

        def draw(steps: int, g: torch.Generator) -> Tensors:
            drawn = {"gumbel": gumbel(torch.rand(steps, rows.total, self.choices, generator=g, device=g.device))}
            return drawn if self.parameter_noise is None else drawn | {SEED: draw_seeds(steps, rows.total, g)}

        return Noise(draw, generator, rows, noise_chunk(rows.total * self.choices))

    @torch.inference_mode()
    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Return the most likely choice; with ``noise``, a uniform one until the first update and a sample later."""
        outputs, new = self.run_acting(self.step_inputs(step), state, step.first.unsqueeze(0), noise)
        logits = outputs["policy"].squeeze(0)
        if noise is not None and self.updates == 0:
            logits = torch.zeros_like(logits)
        if self.mask is not None:
            logits = mask_logits(logits, step.observation[self.mask])
        action = logits.argmax(-1) if noise is None else categorical_sample(logits, noise["gumbel"])
        return AgentStep({self.name: action}, {}, HiddenState(state | new) if new else state)

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return the policy's expectation of the minimum over critics of Q."""
        self.refuse_recurrent_value()
        q = self.q(self.step_inputs(step), state, step.first[None]).amin(-2).squeeze(0)
        return self.unscale_value((self.distribution(step, state)[self.name]["probabilities"] * q).sum(-1))

    @torch.inference_mode()
    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Return the probability of each choice."""
        mask = None if self.mask is None else step.observation[self.mask][None]
        log_p = self.log_policy(self.step_inputs(step), state, step.first[None], mask)
        return {self.name: {"probabilities": log_p.exp().squeeze(0)}}

    def log_policy(self, inputs: Tensors, state: HiddenState, first: Tensor, mask: Tensor | None) -> Tensor:
        """Return the log-probability of every choice, ``[T, B, A]``; finite where it is masked."""
        logits = self.run("actor", inputs, state, first)[0]["policy"]
        return (logits if mask is None else mask_logits(logits, mask)).log_softmax(-1)

    def q(self, inputs: Tensors, state: HiddenState, first: Tensor, target: bool = False) -> Tensor:
        """Return Q of every choice by each critic, ``[T, B, critics, A]``."""
        value = self.run("critic", inputs, state, first, target)[0]["value"]
        return value.unsqueeze(-2) if self.config.critics == 1 else value

    @property
    def noise_target(self) -> float:
        """The KL of an ε-greedy policy, with ``parameter_noise`` as ε."""
        return epsilon_kl(self.config.parameter_noise, self.choices)

    def perturbed_distance(
        self, batch: Batch, outputs: Tensors, perturbed: Tensors, sum_over_ranks: SumOverRanks = single_rank
    ) -> Tensor:
        """Return the KL of the policies over allowed choices."""
        mask = None if self.mask is None else batch.observation[self.mask][CURRENT]
        both = outputs["policy"], perturbed["policy"]
        plain, other = (x if mask is None else mask_logits(x, mask) for x in both)
        return softmax_kl(plain, other, batch.real, sum_over_ranks)

    def taken_q(self, batch: Batch, inputs: Tensors, first: Tensor) -> Tensor:
        return gather_action(self.q(inputs, batch.state, first), batch.action[self.name])

    @torch.no_grad()
    def target_value(self, batch: Batch, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Return E_π[min Q'] + α H(π) of the next states, and α H(π) alone, ``[T, B]`` each."""
        inputs, first = at_time(inputs, batch.first, self.target_states)
        mask = None if self.mask is None else batch.observation[self.mask][self.target_states]
        log_p = self.log_policy(inputs, batch.state, first, mask)
        q = self.q(inputs, batch.state.select("target"), first, target=True)
        alpha, time = self.log_alpha.exp(), len(batch.reward)
        return sac_discrete_value(q, log_p, alpha)[-time:], alpha * policy_entropy(log_p[-time:])

    @torch.no_grad()
    def intermediate_bonus(self, batch: Batch) -> Tensor:
        """Return α H(π) at the intermediate states of n-step returns, ``[n − 1, B]``."""
        observation, first = intermediate_observations(batch)
        mask = None if self.mask is None else observation[self.mask]
        log_p = self.log_policy(self.inputs(observation), batch.state, first, mask)
        return self.log_alpha.exp() * policy_entropy(log_p)

    def actor_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return E_π[α log π − min Q]."""
        inputs, first = at_time(self.inputs(batch.observation), batch.first, CURRENT)
        mask = None if self.mask is None else batch.observation[self.mask][:-1]
        log_p = self.log_policy(inputs, batch.state, first, mask)
        with torch.no_grad():
            q = self.q(inputs, batch.state, first)
        loss = share_sum(sac_discrete_actor_loss(q, log_p, self.log_alpha.exp()), batch.share)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
            most = math.log(self.choices) if mask is None else mask.sum(-1).clamp(min=1).log()
            mean = batch.experience[MEAN]
            found = {"entropy": share_sum(entropy, mean)}
            found[EXCESS_ENTROPY] = share_sum(entropy - self.config.target_entropy * most, mean)
        return {"actor": loss}, found
