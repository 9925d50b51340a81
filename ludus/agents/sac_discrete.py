"""Discrete SAC: soft actor-critic for one Discrete action, with exact expectations (Christodoulou 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import not_
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ludus.agents.off_policy import CURRENT, MEAN, NEXT, OffPolicy, intermediate_observations, number_of_choices
from ludus.agents.replay_actor_critic import (
    EXCESS_ENTROPY,
    apply_burn_in,
    at_time,
    noise_chunk,
    priority_metric,
    soft_alpha_loss,
    soft_learn,
    soft_losses,
    soft_targets,
    unused_learning_rate,
)
from ludus.core.batch import Batch, Learned
from ludus.core.config import UnusedSetting
from ludus.core.errors import check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs, is_mask, mask_name
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import Group, Updater
from ludus.experience.config import ReplayConfig
from ludus.networks.build import network_spec
from ludus.ops.distributions import categorical_sample, gumbel, mask_logits
from ludus.ops.policy_gradient import share_sum
from ludus.ops.q_learning import (
    gather_action,
    policy_entropy,
    sac_critic_loss,
    sac_discrete_actor_loss,
    sac_discrete_value,
)


@dataclass(frozen=True)
class DiscreteSACConfig(ReplayConfig):
    """Settings of discrete SAC."""

    UNUSED = (
        *ReplayConfig.UNUSED,
        UnusedSetting(
            "alpha_learning_rate target_entropy", "learn_alpha", not_, "agent.learn_alpha is off, so alpha stays"
        ),
    )
    learning_rate: float = 3e-4  # raise for speed, lower when the return collapses
    actor_learning_rate: float = 0.0  # of the actor; 0: learning_rate
    critic_learning_rate: float = 0.0  # of the critics; 0: learning_rate
    alpha_learning_rate: float = 0.0  # of the temperature; 0: learning_rate
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    tau: float = 0.005  # Polyak coefficient of the target networks: higher is faster and less stable
    critics: int = 2  # the target takes their minimum; 2 against overestimation
    alpha: float = 1.0  # temperature: weight of the entropy bonus (initial value, if learned); raise to explore more
    learn_alpha: bool = True  # learn the temperature to keep the entropy near target_entropy
    target_entropy: float = 0.98  # as a share of the maximum entropy; lower for a more deterministic policy
    max_grad_norm: float = 0.0  # gradients are scaled down to this norm; 0: never
    optimizer_eps: float = 1e-8  # raise for smoother steps

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        rates = ("actor_learning_rate", "critic_learning_rate", "alpha_learning_rate")
        check_ranges(self, fraction=("target_entropy",), positive=("tau", "critics", "alpha"), nonnegative=rates)

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also ``learning_rate`` where every network has a separate one."""
        yield from super().unused(observation, action, rows)
        alpha = {"alpha": self.alpha_learning_rate} if self.learn_alpha else {}
        yield from unused_learning_rate(actor=self.actor_learning_rate, critic=self.critic_learning_rate, **alpha)


class DiscreteSAC(OffPolicy):
    """A categorical policy that maximizes reward and entropy, with critics learned from a replay buffer."""

    Config: type[Any] = DiscreteSACConfig
    network_names = ("actor", "critic")
    acting = ("actor",)
    with_target = ("critic",)
    log_alpha: Tensor

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks)
        self.choices, (self.name,) = number_of_choices(action), action
        self.mask = mask_name(self.name, action) if any(map(is_mask, observation)) else None
        log_alpha = torch.tensor(math.log(config.alpha))
        if config.learn_alpha:
            self.log_alpha = nn.Parameter(log_alpha)
        else:
            self.register_buffer("log_alpha", log_alpha)

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for an actor, and critics that output Q of all choices."""
        choices = number_of_choices(action)
        return {
            "actor": network_spec(observation, {"policy": (choices,)}),
            "critic": network_spec(observation, {"value": (choices,)})._replace(members=config.critics),
        }

    @property
    def soft(self) -> bool:
        """Values include the policy's entropy."""
        return True

    def parameter_groups(self) -> dict[str, Group]:
        """Step critics, actor and temperature separately."""
        config = self.config
        groups = {
            "critic": self.make_group(self.networks["critic"].parameters(), config.critic_learning_rate),
            "actor": self.make_group(self.networks["actor"].parameters(), config.actor_learning_rate),
        }
        if isinstance(self.log_alpha, nn.Parameter):
            groups["alpha"] = self.make_group([self.log_alpha], config.alpha_learning_rate)
        return groups

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Draw Gumbel numbers for sampling."""

        def draw(steps: int, g: torch.Generator) -> Tensors:
            return {"gumbel": gumbel(torch.rand(steps, rows.total, self.choices, generator=g, device=g.device))}

        return Noise(draw, generator, rows, noise_chunk(rows.total * self.choices))

    @torch.inference_mode()
    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Return the most likely choice; with ``noise``, a uniform one until the first update and a sample later."""
        observation = {name: x.unsqueeze(0) for name, x in step.observation.items()}
        outputs, new = self.run("actor", self.inputs(observation), state, step.first.unsqueeze(0))
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
        inputs = self.inputs({name: x.unsqueeze(0) for name, x in step.observation.items()})
        q = self.q(inputs, state, step.first[None]).amin(-2).squeeze(0)
        return (self.distribution(step, state)[self.name]["probabilities"] * q).sum(-1)

    @torch.inference_mode()
    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Return the probability of each choice."""
        inputs = self.inputs({name: x.unsqueeze(0) for name, x in step.observation.items()})
        mask = None if self.mask is None else step.observation[self.mask][None]
        return {self.name: {"probabilities": self.log_policy(inputs, state, step.first[None], mask).exp().squeeze(0)}}

    def log_policy(self, inputs: Tensors, state: HiddenState, first: Tensor, mask: Tensor | None) -> Tensor:
        """Return the log-probability of every choice, ``[T, B, A]``; finite where it is masked."""
        logits = self.run("actor", inputs, state, first)[0]["policy"]
        return (logits if mask is None else mask_logits(logits, mask)).log_softmax(-1)

    def q(self, inputs: Tensors, state: HiddenState, first: Tensor, target: bool = False) -> Tensor:
        """Return Q of every choice by each critic, ``[T, B, critics, A]``."""
        value = self.run("critic", inputs, state, first, target)[0]["value"]
        return value.unsqueeze(-2) if self.config.critics == 1 else value

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Apply the burn-in and set shares."""
        return self.with_shares(apply_burn_in(self, batch, None), sum_over_ranks)

    @torch.no_grad()
    def target_value(self, batch: Batch, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Return E_π[min Q'] + α H(π) of the next states, and α H(π) alone, ``[T, B]`` each."""
        first, mask = batch.first, None if self.mask is None else batch.observation[self.mask]
        if not self.recurrent:  # a recurrent network must see all steps
            inputs, first = at_time(inputs, first, NEXT)
            mask = None if mask is None else mask[1:]
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

    def critic_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return half the squared TD errors of all critics."""
        inputs = self.inputs(batch.observation)
        value, bonus = self.target_value(batch, inputs)
        target = soft_targets(self, batch, value, bonus)
        now, first = at_time(inputs, batch.first, CURRENT)
        q = gather_action(self.q(now, batch.state, first), batch.action[self.name])
        loss = share_sum(sac_critic_loss(q, target), batch.share)
        metrics = {"q": share_sum(q.detach().mean(-1), batch.experience[MEAN])}
        return {"critic": loss}, metrics | priority_metric(q - target.unsqueeze(-1), batch, self.config)

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

    def alpha_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the temperature loss of a batch with the excess entropy of ``actor_loss``."""
        return soft_alpha_loss(self, batch)

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return all losses of a prepared batch together; ``learn`` steps each separately."""
        return soft_losses(self, batch)

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Step critics, actor and temperature."""
        return soft_learn(self, self.prepare(batch, updater.sum), updater)
