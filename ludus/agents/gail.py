"""GAIL: generative adversarial imitation learning (Ho & Ermon 2016), with PPO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ludus.agents.actor_critic import VALUE_ROWS, ActorCritic
from ludus.agents.ppo import PPO, PPOConfig
from ludus.agents.trpo import TRPO, TRPOConfig
from ludus.core.batch import Batch, Learned
from ludus.core.config import AgentConfig
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.types import Tensors
from ludus.core.updater import Group, Updater
from ludus.experience.carrying_rollout import CARRIED, CarryingRollout
from ludus.experience.recorded import make_batch, recorded_steps
from ludus.experience.rollout import RolloutCache
from ludus.networks.action_features import ActionFeatures
from ludus.networks.build import network_spec
from ludus.networks.critic import ACTION
from ludus.ops.imitation import ImitationReward, discriminator_loss, gradient_penalty, imitation_reward
from ludus.ops.policy_gradient import share_sum, shares
from ludus.ops.returns import running_returns
from ludus.preprocess.action_inverter import ActionInverter
from ludus.preprocess.normalization import ObsNormalizer

DISCRIMINATOR = "discriminator"  # network, and its parameter group


@dataclass(frozen=True)
class DiscriminatorConfig(AgentConfig):
    """Settings of the discriminator."""

    # what the policy maximizes; logit: log D − log(1 − D); positive: −log(1 − D), as in the paper, which rewards long
    # episodes whatever happens in them; negative: log D, which rewards short ones
    reward: ImitationReward = "logit"
    # weight of the environment's reward, and 1 minus it of the discriminator's: raise to learn the task as well
    environment_reward: float = 0.0
    discriminator_learning_rate: float = 1e-3  # raise when it cannot tell the policy from the expert, else lower
    discriminator_updates: int = 16  # optimizer steps per rollout; more: rewards that follow the policy faster
    discriminator_batch: int = 256  # pairs of the policy, and as many of the expert, per optimizer step
    # weight of ‖∇ logit‖² between pairs of both: raise for smoother rewards, lower for faster ones; 0: none
    gradient_penalty_coef: float = 0.3

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(
            self,
            fraction=("environment_reward",),
            positive=("discriminator_learning_rate", "discriminator_updates", "discriminator_batch"),
            nonnegative=("gradient_penalty_coef",),
        )
        if vars(self).get("learning_rate_schedule") == "kl":
            raise UserError(
                "agent.learning_rate_schedule is kl, which would change the rate of the discriminator with that of the "
                "policy; use constant, linear or a schedule as agent.learning_rate."
            )

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also the settings of a discriminator whose reward is not used."""
        yield from super().unused(observation, action, rows)
        if self.environment_reward == 1:
            yield "reward", "agent.environment_reward is 1, so that of the discriminator is not used"


@dataclass(frozen=True)
class GAILConfig(DiscriminatorConfig, PPOConfig):
    """Settings of GAIL with PPO."""

    SCHEDULABLE = (*PPOConfig.SCHEDULABLE, "environment_reward")
    # λ in the paper: raise when the policy becomes deterministic before it has found the expert's states
    entropy_coef: float = 0.01


@dataclass(frozen=True)
class GAILTRPOConfig(DiscriminatorConfig, TRPOConfig):
    """GAIL with TRPO, as in the paper."""

    SCHEDULABLE = (*TRPOConfig.SCHEDULABLE, "environment_reward")


class AdversarialImitation(ActorCritic):
    """Replaces the rewards of a rollout by those of a discriminator before an on-policy agent learns from it.

    The discriminator sees raw observations, normalized by statistics of its own, and the actions as the environment
    takes them.
    """

    uses_dataset = needs_dataset = True
    generator: torch.Generator

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Also ask for the discriminator D(s, a)."""
        spec = network_spec(observation, {"logit": (1,)})
        if ACTION in spec.inputs:
            raise UserError(f'An observation is called "{ACTION}", which the discriminator uses; rename it.')
        inputs = spec.inputs | {ACTION: (ActionFeatures(action, {}).size,)}
        discriminator = spec._replace(inputs=inputs, concatenate=True)
        return super().requirements(observation, action, config, shared) | {DISCRIMINATOR: discriminator}

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        policy_networks = {name: network for name, network in networks.items() if name != DISCRIMINATOR}
        super().__init__(observation, action, config, policy_networks, batch)
        self.discriminator = networks[DISCRIMINATOR]
        if self.discriminator.recurrent:
            raise UserError(
                "The discriminator judges single steps, so it cannot be recurrent; set network.discriminator.body (or "
                "its net1d) to mlp."
            )
        self.penalizes_gradient = bool(config.gradient_penalty_coef)
        self.discriminator_normalizer = ObsNormalizer(self.preprocess.outputs)
        self.action_features = ActionFeatures(action, self.action_transform)
        self.inverter = ActionInverter(action, self.action_transform)
        self.expert: tuple[Tensors, Tensors] | None = None  # observations and policy-space actions [N, …]

    def make_cache(self, rows: Rows) -> RolloutCache:
        """Make a cache of one rollout, and take the expert's pairs."""
        assert self.dataset is not None, "the container gives the dataset"
        self.expert = recorded_steps(self.dataset, self.inverter, self.device)
        kind = CarryingRollout if self.config.normalize_reward else RolloutCache
        return kind(self.config.rollout, rows.size, self.given_gamma, self.device)

    def parameter_groups(self) -> dict[str, Group]:
        """Step the discriminator by an optimizer of its own."""
        own = {id(p) for p in self.discriminator.parameters()}
        groups = {
            name: replace(group, parameters=tuple(p for p in group.parameters if id(p) not in own))
            for name, group in super().parameter_groups().items()
        }
        rate = self.config.discriminator_learning_rate
        return groups | {DISCRIMINATOR: self.make_group(self.discriminator.parameters(), rate)}

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Step the discriminator, then learn from its rewards."""
        metrics = self.learn_discriminator(batch, updater)
        learned = super().learn(self.with_imitation_reward(batch), updater)
        return Learned(learned.metrics | metrics)

    def learn_discriminator(self, batch: Batch, updater: Updater) -> Tensors:
        """Take optimizer steps on pairs of the rollout and of the expert."""
        metrics: Tensors = {}
        for number in range(self.config.discriminator_updates):
            pairs = self.draw_pairs(batch, updater)
            if not number:  # as with rewards, statistics come before their use: acting does not depend on them
                rows = self.preprocess(pairs.observation)
                self.discriminator_normalizer.update(rows, (pairs.share > 0).float(), updater.sum)
            # not ``updater.step``, which may be compiled: second derivatives are not
            gradient, metrics = updater.gradient(self.discriminator_loss, pairs, DISCRIMINATOR)
            norm = updater.apply(gradient, DISCRIMINATOR)["gradient_norm"]
        return metrics | {"discriminator/gradient_norm": norm}

    def draw_pairs(self, batch: Batch, updater: Updater) -> Batch:
        """Draw pairs ``[1, 2M]`` of the policy, of which padding has share 0, and then of the expert."""
        assert self.expert is not None, "make_cache comes before learn"
        count, columns = self.config.discriminator_batch, batch.reward.shape[1]
        chosen = self._draw(batch.reward.numel(), count)
        time, row = chosen // columns, chosen % columns
        taken = self._draw(len(next(iter(self.expert[1].values()))), count)
        own = [{name: x[time, row] for name, x in tensors.items()} for tensors in (batch.observation, batch.action)]
        expert = [{name: x[taken] for name, x in tensors.items()} for tensors in self.expert]
        observation, action = (
            {name: torch.cat([x, theirs[name].to(x.dtype)]) for name, x in mine.items()}
            for mine, theirs in zip(own, expert, strict=True)
        )
        real = batch.real[time, row].float()
        parts = (real, torch.ones_like(real))
        label = torch.cat([torch.zeros_like(real), torch.ones_like(real)])
        mix = torch.rand(count, generator=self.generator).to(self.device)
        experience = {"expert": label, "mix": torch.cat([mix, mix])}
        pairs = make_batch(observation, action, experience, torch.cat([chosen, taken]), {})
        share = torch.cat([0.5 * shares(part, sum_over_ranks=updater.sum) for part in parts])
        return replace(pairs, share=share.unsqueeze(0))

    def _draw(self, total: int, count: int) -> Tensor:
        return torch.randint(total, (count,), generator=self.generator).to(self.device)

    def discriminator_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the logistic loss of pairs, and the penalty on the gradient between those of policy and expert."""
        inputs, expert = self.discriminator_inputs(batch.observation, batch.action), batch.experience["expert"]
        logit = self.logit(inputs)
        losses = {DISCRIMINATOR: share_sum(discriminator_loss(logit, expert), batch.share)}
        if self.penalizes_gradient:
            losses["gradient_penalty"] = self.penalty(inputs, batch)
        with torch.no_grad():
            probability = 2 * logit.sigmoid() * batch.share  # each half has share ½
            means = {"expert": (probability * expert).sum(), "policy": (probability * (1 - expert)).sum()}
        return losses, {f"discriminator/{name}": x for name, x in means.items()}

    def penalty(self, inputs: Tensors, batch: Batch) -> Tensor:
        """Return the gradient penalty at points between a pair of the policy and one of the expert."""
        count = self.config.discriminator_batch
        mix, share = batch.experience["mix"][:, :count], 2 * batch.share[:, :count]  # 0 for padding
        points = {name: _between(x[:, :count], x[:, count:], mix) for name, x in inputs.items()}
        free = [x.requires_grad_() for x in points.values() if x.is_floating_point()]
        slopes = torch.autograd.grad(self.logit(points).sum(), free, create_graph=True, materialize_grads=True)
        return share_sum(gradient_penalty(torch.cat([x.flatten(2) for x in slopes], -1)), share)

    def discriminator_inputs(self, observation: Tensors, action: Tensors) -> Tensors:
        """Return what the discriminator sees of raw observations and policy-space actions ``[T, B, …]``."""
        ready = self.discriminator_normalizer(self.preprocess(observation))
        return dict(ready) | {ACTION: self.action_features(action, self.policy)}

    def logit(self, inputs: Tensors) -> Tensor:
        """Return the logit of D ``[T, B]``."""
        first = torch.zeros(inputs[ACTION].shape[:2], dtype=torch.bool, device=self.device)
        logit: Tensor = self.discriminator(inputs, HiddenState(), first)[0]["logit"].squeeze(-1)
        return logit

    @torch.no_grad()
    def with_imitation_reward(self, batch: Batch) -> Batch:
        """Replace the rewards by those of the discriminator, mixed with the environment's; padding has 0."""
        time, columns = batch.reward.shape
        steps = max(1, VALUE_ROWS // columns)
        logits = []
        for start in range(0, time, steps):
            part = slice(start, min(start + steps, time))
            observation, action = ({k: x[part] for k, x in xs.items()} for xs in (batch.observation, batch.action))
            logits.append(self.logit(self.discriminator_inputs(observation, action)))
        imitation, weight = imitation_reward(torch.cat(logits), self.config.reward), self.config.environment_reward
        reward = (1 - weight) * imitation + weight * batch.reward if weight else imitation
        reward = torch.where(batch.real, reward, 0)
        if self.reward_scaler is None:
            return replace(batch, reward=reward)
        carried, ended = batch.row_state[CARRIED], batch.terminated | batch.truncated
        before = carried.masked_fill(batch.first[0], 0)
        returns, after = running_returns(reward, ended, batch.real, self.config.gamma, before)
        carried.copy_(after)  # in the cache, for the next rollout
        return replace(batch, reward=reward, row_state={"return": returns})


def _between(policy: Tensor, expert: Tensor, mix: Tensor) -> Tensor:
    """Return points between both, ``[1, M, …]``; what is no number (a mask, a category) is the expert's."""
    if not expert.is_floating_point():
        return expert
    mix = mix.reshape(*mix.shape, *[1] * (expert.dim() - 2))
    return (mix * expert + (1 - mix) * policy).detach()


class GAIL(AdversarialImitation, PPO):
    """PPO on the rewards of a discriminator."""

    Config: type[Any] = GAILConfig
    network_names = (*PPO.network_names, DISCRIMINATOR)


class GAILTRPO(AdversarialImitation, TRPO):
    """TRPO on the rewards of a discriminator, as in the paper."""

    Config: type[Any] = GAILTRPOConfig
    network_names = (*TRPO.network_names, DISCRIMINATOR)
