"""Discrete SAC: soft actor-critic for one Discrete action, with exact expectations (Christodoulou 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import not_
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ludus.agents.off_policy import MEAN, OffPolicy, one_choice, states_passed
from ludus.agents.replay_actor_critic import (
    EXCESS,
    burned_in,
    chunk,
    ends,
    observation_shapes,
    soft_alpha_loss,
    soft_learn,
    soft_losses,
    soft_targets,
    surprise,
    unused_rate,
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
    """Settings of SAC for one choice."""

    UNUSED = (
        *ReplayConfig.UNUSED,
        UnusedSetting(
            "alpha_learning_rate target_entropy", "learn_alpha", not_, "agent.learn_alpha is off, so alpha stays"
        ),
    )
    learning_rate: float = 3e-4  # raise for speed, lower when the return collapses
    actor_learning_rate: float = 0.0  # of the policy alone; 0: learning_rate
    critic_learning_rate: float = 0.0  # of the critics alone; 0: learning_rate
    alpha_learning_rate: float = 0.0  # of the temperature alone; 0: learning_rate
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    tau: float = 0.005  # how far targets move after an update: more is quicker and less steady
    critics: int = 2  # the target takes their minimum; 2 against overestimation
    alpha: float = 1.0  # temperature: weight of the entropy bonus (the first value, if learned); raise to explore more
    learn_alpha: bool = True  # learn the temperature so that the entropy stays near target_entropy
    target_entropy: float = 0.98  # as a share of the maximum entropy; lower for a more deterministic policy
    max_grad_norm: float = 0.0  # gradients are scaled down to this norm; 0: never
    optimizer_eps: float = 1e-8  # raise for smoother steps

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        rates = ("actor_learning_rate", "critic_learning_rate", "alpha_learning_rate")
        check_ranges(self, fraction=("target_entropy",), positive=("tau", "critics", "alpha"), nonnegative=rates)

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also a learning rate that every part has one of its own for."""
        yield from super().unused(observation, action, rows)
        alpha = {"alpha": self.alpha_learning_rate} if self.learn_alpha else {}
        yield from unused_rate(actor=self.actor_learning_rate, critic=self.critic_learning_rate, **alpha)


class DiscreteSAC(OffPolicy):
    """A policy over choices that seeks reward and entropy, with critics learned from a replay; masks are heeded."""

    Config: type[Any] = DiscreteSACConfig
    network_names = ("actor", "critic")
    acting = ("actor",)
    followed = ("critic",)
    log_alpha: Tensor

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks)
        self.choices, (self.name,) = one_choice(action), action
        self.mask = mask_name(self.name, action) if any(map(is_mask, observation)) else None
        log_alpha = torch.tensor(math.log(config.alpha))
        if config.learn_alpha:
            self.log_alpha = nn.Parameter(log_alpha)
        else:
            self.register_buffer("log_alpha", log_alpha)

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """An actor, and critics that value all choices at once; they share nothing."""
        inputs, choices = observation_shapes(observation), one_choice(action)
        return {
            "actor": NetworkSpec(inputs, {"policy": (choices,)}),
            "critic": NetworkSpec(inputs, {"value": (choices,)}, members=config.critics),
        }

    @property
    def soft(self) -> bool:
        """Values include the policy's entropy."""
        return True

    def parameter_groups(self) -> dict[str, Group]:
        """Critics, actor and temperature step apart."""
        config = self.config
        groups = {
            "critic": self.make_group(self.networks["critic"].parameters(), config.critic_learning_rate),
            "actor": self.make_group(self.networks["actor"].parameters(), config.actor_learning_rate),
        }
        if isinstance(self.log_alpha, nn.Parameter):
            groups["alpha"] = self.make_group([self.log_alpha], config.alpha_learning_rate)
        return groups

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """What the policy samples with."""

        def draw(steps: int, g: torch.Generator) -> Tensors:
            return {"gumbel": gumbel(torch.rand(steps, rows.total, self.choices, generator=g, device=g.device))}

        return Noise(draw, generator, rows, chunk(rows.total * self.choices))

    @torch.inference_mode()
    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """The likeliest choice; with ``noise`` any choice before the first update, later one of the policy's."""
        observation = {name: x.unsqueeze(0) for name, x in step.observation.items()}
        outputs, new = self.run("actor", self.preprocess(observation), state, step.first.unsqueeze(0))
        logits = outputs["policy"].squeeze(0)
        if noise is not None and self.updates == 0:
            logits = torch.zeros_like(logits)
        if self.mask is not None:
            logits = mask_logits(logits, step.observation[self.mask])
        action = logits.argmax(-1) if noise is None else categorical_sample(logits, noise["gumbel"])
        return AgentStep({self.name: action}, {}, HiddenState(state | new) if new else state)

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """What the policy expects of the least that a critic says."""
        self.refuse_memory()
        seen = self.preprocess({name: x.unsqueeze(0) for name, x in step.observation.items()})
        q = self.q(seen, state, step.first[None]).amin(-2).squeeze(0)
        return (self.distribution(step, state)[self.name]["probabilities"] * q).sum(-1)

    @torch.inference_mode()
    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """The probability of each choice."""
        seen = self.preprocess({name: x.unsqueeze(0) for name, x in step.observation.items()})
        mask = None if self.mask is None else step.observation[self.mask][None]
        return {self.name: {"probabilities": self.log_policy(seen, state, step.first[None], mask).exp().squeeze(0)}}

    def log_policy(self, seen: Tensors, state: HiddenState, first: Tensor, mask: Tensor | None) -> Tensor:
        """The log-probability of every choice, ``[T, B, A]``; finite where it is forbidden."""
        logits = self.run("actor", seen, state, first)[0]["policy"]
        return (logits if mask is None else mask_logits(logits, mask)).log_softmax(-1)

    def q(self, seen: Tensors, state: HiddenState, first: Tensor, target: bool = False) -> Tensor:
        """What each critic says of every choice, ``[T, B, critics, A]``."""
        value = self.run("critic", seen, state, first, target)[0]["value"]
        return value.unsqueeze(-2) if self.config.critics == 1 else value

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Burn in what remembers."""
        return self.weigh(burned_in(self, batch, None), sum_over_ranks)

    @torch.no_grad()
    def target_value(self, batch: Batch, seen: Tensors) -> tuple[Tensor, Tensor]:
        """The policy's expectation of the target critics' least values, its entropy's worth added, and that alone.

        Both ``[T, B]``, of the states that transitions lead to.
        """
        first, mask = batch.first, None if self.mask is None else batch.observation[self.mask]
        if not self.recurrent:  # a memory sees all steps, to be ready for those that count
            seen, first = ends(seen, first, start=False)
            mask = None if mask is None else mask[1:]
        log_p = self.log_policy(seen, batch.state, first, mask)
        q = self.q(seen, batch.state.select("target"), first, target=True)
        alpha, time = self.log_alpha.exp(), len(batch.reward)
        return sac_discrete_value(q, log_p, alpha)[-time:], alpha * policy_entropy(log_p[-time:])

    @torch.no_grad()
    def bonus_passed(self, batch: Batch) -> Tensor:
        """The worth of the policy's entropy at the states that n-step returns pass, ``[n − 1, B]``."""
        observation, first = states_passed(batch)
        mask = None if self.mask is None else observation[self.mask]
        log_p = self.log_policy(self.preprocess(observation), batch.state, first, mask)
        return self.log_alpha.exp() * policy_entropy(log_p)

    def critic_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Half the squared TD errors of all critics."""
        seen = self.preprocess(batch.observation)
        value, bonus = self.target_value(batch, seen)
        target = soft_targets(self, batch, value, bonus)
        now, first = ends(seen, batch.first, start=True)
        q = gather_action(self.q(now, batch.state, first), batch.action[self.name])
        loss = share_sum(sac_critic_loss(q, target), batch.share)
        metrics = {"q": share_sum(q.detach().mean(-1), batch.experience[MEAN])}
        return {"critic": loss}, metrics | surprise(q - target.unsqueeze(-1), batch, self.config)

    def actor_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """The policy's expectation of what the critics say, negative, and of its entropy's worth."""
        seen, first = ends(self.preprocess(batch.observation), batch.first, start=True)
        mask = None if self.mask is None else batch.observation[self.mask][:-1]
        log_p = self.log_policy(seen, batch.state, first, mask)
        with torch.no_grad():
            q = self.q(seen, batch.state, first)
        loss = share_sum(sac_discrete_actor_loss(q, log_p, self.log_alpha.exp()), batch.share)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
            most = math.log(self.choices) if mask is None else mask.sum(-1).clamp(min=1).log()
            mean = batch.experience[MEAN]
            found = {"entropy": share_sum(entropy, mean)}
            found[EXCESS] = share_sum(entropy - self.config.target_entropy * most, mean)
        return {"actor": loss}, found

    def alpha_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """The temperature's; of a batch that has what ``actor_loss`` told."""
        return soft_alpha_loss(self, batch)

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """All losses of a batch that ``prepare`` made ready."""
        return soft_losses(self, batch)

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """A step each of critics, actor and temperature."""
        return soft_learn(self, self.prepare(batch, updater.sum), updater)
