"""Behaviour cloning: supervised learning of a policy from recorded actions (Pomerleau 1989)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from ludus.agents.actor_critic import VALUE_ROWS, ActorCritic
from ludus.core.batch import Batch, Learned
from ludus.core.cache import ExperienceCache
from ludus.core.config import AgentConfig, Plan, RunOutline
from ludus.core.errors import UserError, check_ranges
from ludus.core.network import Network
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.types import Tensors
from ludus.core.updater import OptimizerName, Updater
from ludus.experience.recorded import RecordedCache, ReturnsToGo, returns_to_go
from ludus.networks.policy_config import PolicyConfig
from ludus.ops.distributions import MASKED
from ludus.ops.policy_gradient import entropy_loss, share_sum, shares, value_loss
from ludus.preprocess.actions import ActionInverter
from ludus.preprocess.normalization import unused_normalizer


@dataclass(frozen=True)
class BCConfig(PolicyConfig, AgentConfig):
    """Settings of behaviour cloning."""

    ONLY_OFFLINE: ClassVar[bool] = True
    learning_rate: float = 1e-3  # raise for speed, lower when the loss is noisy
    learning_rate_schedule: Literal["constant", "linear"] = "linear"  # linear: falls to 0 at nb_step
    batch_size: int = 256  # recorded steps per update: more are slower and give less noise
    gamma: float = 0.99  # discount of the returns that the value function is fitted to
    value_coef: float = 0.5  # weight of the value loss; a fitted value helps to fine-tune the policy with ppo; 0: none
    # raise when the policy becomes too deterministic to be fine-tuned; it also keeps standard deviations from vanishing
    entropy_coef: float = 1e-3
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm; 0: never
    optimizer: OptimizerName = "adam"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    weight_decay: float = 0.0  # raise against overfitting: adamw apart from the gradient, others as a penalty
    optimizer_eps: float = 1e-5  # eps of the optimizer; raise for smoother steps
    normalize_observation: bool = True  # vectors by the recordings' mean and standard deviation, saved with the policy
    normalize_reward: bool = True  # by the standard deviation of the recordings' discounted returns, as ppo does

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(
            self,
            fraction=("gamma",),
            positive=("learning_rate", "batch_size", "optimizer_eps"),
            nonnegative=("entropy_coef", "value_coef", "max_grad_norm", "weight_decay"),
        )

    def plan(self, rows: int) -> Plan:
        """One optimizer step per update, which nb_step counts."""
        return Plan(optimizer_steps=1, batch=self.batch_size)

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Settings of distributions and normalizers that do nothing, and those of the value without one."""
        yield from self.unused_distribution(action)
        yield from unused_normalizer(self, observation)
        if not self.value_coef:
            why = "agent.value_coef is 0, so no value is learned"
            yield from ((name, why) for name in ("gamma", "normalize_reward"))


class BC(ActorCritic):
    """Maximizes the log-probability of recorded actions; its networks and policy are those of PPO."""

    Config: type[Any] = BCConfig
    uses_dataset = needs_dataset = learns_offline = True

    @classmethod
    def adapt_defaults(cls, config: Any, run: RunOutline) -> dict[str, Any]:
        """Keep the defaults."""
        return {}

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks, batch)
        self.observation, self.inverter = observation, ActionInverter(action, self.action_transform)

    def check_trainable(self) -> None:
        """Refuse recurrent networks."""
        if self.recurrent:
            raise UserError(
                "Imitation learns from single steps, and a recurrent network from sequences; use a feed-forward "
                "network, such as network.body mlp, or fine-tune with ppo."
            )

    def make_cache(self, rows: Rows) -> ExperienceCache:  # type: ignore[override]
        """Take the statistics of the recordings, unless init_from gave others, and make the cache to draw from."""
        assert self.dataset is not None, "the container gives the dataset"
        returns = returns_to_go(self.dataset, self.config.gamma, self.device)
        cache = RecordedCache(self.dataset, self.inverter, self.config.batch_size, returns, self.device)
        self.refuse_masked(cache.observation, cache.action)
        self.fit_statistics(cache.observation, returns)
        return cache

    @torch.no_grad()
    def refuse_masked(self, observation: Tensors, action: Tensors) -> None:
        """Refuse recorded actions that a mask forbids, which no policy can learn."""
        for start in range(0, len(next(iter(action.values()))), VALUE_ROWS) if self.masked else ():
            seen, done = ({k: x[start : start + VALUE_ROWS] for k, x in xs.items()} for xs in (observation, action))
            rows = len(next(iter(done.values())))
            outputs = {k: torch.zeros(rows, *shape, device=self.device) for k, shape in self.policy.outputs.items()}
            if bool((self.policy.evaluate(outputs, done, seen)["log_prob"] < MASKED / 2).any()):
                assert self.dataset is not None
                raise UserError(
                    f'The dataset "{self.dataset.name}" has an action that the action mask at its step forbids; remove '
                    "that episode."
                )

    @torch.no_grad()
    def fit_statistics(self, observation: Tensors, returns: ReturnsToGo) -> None:
        """Set the normalizers that have seen nothing yet; they stay as they are then."""
        weight = torch.ones(1, len(returns.total), device=self.device)
        known = () if self.normalizer is None else self.normalizer.statistics.values()
        if self.normalizer is not None and not any(statistics.count for statistics in known):
            rows = {name: x.unsqueeze(0) for name, x in observation.items()}
            self.normalizer.update(self.preprocess(rows), weight)
        if self.reward_scaler is not None and not self.reward_scaler.statistics.count:
            self.reward_scaler.update(returns.so_far.unsqueeze(0), weight)

    @torch.no_grad()
    def with_targets(self, batch: Batch) -> Batch:
        """Add the return to go of each step; where the recording does not end with a termination, V completes it."""
        target = batch.experience["total"]
        if self.reward_scaler is not None:
            target = self.reward_scaler.scale(target)
        rest = self._final_values(batch) if self.config.value_coef else None
        if rest is not None:
            target = target + batch.experience["discount"] * rest
        return replace(batch, experience={"return": target.float()}, final={})

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Take one optimizer step."""
        batch = self.with_targets(batch)
        share = shares(batch.real.float(), sum_over_ranks=updater.sum)
        return Learned(updater.step(self.compute_loss, replace(batch, share=share), "all"))

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return −log π(a|s), value and entropy losses of recorded steps."""
        terms, value = self.evaluate(batch)
        losses = {
            "policy": share_sum(-terms["log_prob"], batch.share),
            "value": share_sum(value_loss(value, batch.experience["return"]), batch.share),
            "entropy": share_sum(entropy_loss(terms["entropy"]), batch.share),
        }
        return losses, {}
