"""Behaviour cloning: supervised learning of a policy from recorded actions (Pomerleau 1989)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from ludus.agents.actor_critic import ActorCritic
from ludus.core.batch import Batch, Learned
from ludus.core.cache import ExperienceCache
from ludus.core.config import AgentConfig, Plan, RunOutline
from ludus.core.errors import check_ranges
from ludus.core.network import Network
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.types import Tensors
from ludus.core.updater import OptimizerName, Updater
from ludus.experience.recorded import RecordedCache, RecordedSequences, RecordedSteps, ReturnsToGo, returns_to_go
from ludus.experience.sequences import SequenceShape
from ludus.networks.policy_config import PolicyConfig
from ludus.ops.policy_gradient import entropy_loss, share_sum, shares, value_loss
from ludus.ops.returns import lambda_returns
from ludus.preprocess.action_inverter import ActionInverter
from ludus.preprocess.normalization import unused_normalizer

STATISTICS_ROWS = 65_536  # most recorded observations that are preprocessed at once, to bound their memory


@dataclass(frozen=True)
class BCConfig(PolicyConfig, AgentConfig):
    """Settings of behaviour cloning."""

    ONLY_OFFLINE: ClassVar[bool] = True
    UNUSED_OFFLINE: ClassVar[tuple[str, ...]] = ("gsde_interval",)
    UNUSED_FEED_FORWARD: ClassVar[tuple[str, ...]] = ("sequence", "burn_in")
    learning_rate: float = 1e-3  # raise for speed, lower when the loss is noisy
    learning_rate_schedule: Literal["constant", "linear"] = "linear"  # linear: falls to 0 at nb_step
    batch_size: int = 256  # recorded steps per update: more are slower and give less noise
    sequence: int = 32  # recurrent networks: steps of a sequence, of which batches have batch_size / sequence
    # recurrent networks: steps before a sequence that only warm up the hidden state, unless an episode begins in them;
    # raise where actions depend on what was seen long before
    burn_in: int = 16
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
            positive=("learning_rate", "batch_size", "sequence", "optimizer_eps"),
            nonnegative=("burn_in", "entropy_coef", "value_coef", "max_grad_norm", "weight_decay"),
        )

    @property
    def sequences(self) -> SequenceShape:
        """The sequences of a batch, whose number is rounded up."""
        return SequenceShape(self.sequence, self.burn_in, -(-self.batch_size // self.sequence))

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

    def make_cache(self, rows: Rows) -> ExperienceCache:  # type: ignore[override]
        """Take the statistics of the recordings, unless init_from gave others, and make the cache to draw from."""
        assert self.dataset is not None, "the container gives the dataset"
        config, source = self.config, (self.dataset, self.inverter)
        returns = returns_to_go(self.dataset, config.gamma, self.device)
        cache: RecordedCache
        if self.recurrent:
            cache = RecordedSequences(*source, config.sequences, config.gamma, self.device)
        else:
            cache = RecordedSteps(*source, config.batch_size, returns, self.device)
        self.fit_statistics(cache, returns)
        return cache

    @torch.no_grad()
    def fit_statistics(self, cache: RecordedCache, returns: ReturnsToGo) -> None:
        """Set the normalizers that have seen nothing yet; they stay as they are then."""
        known = () if self.normalizer is None else self.normalizer.statistics.values()
        if self.normalizer is not None and known and not any(statistics.count for statistics in known):
            preprocess, real = self.preprocess.select(self.normalizer.names).to(self.device), cache.real.float()
            for start in range(0, len(real), STATISTICS_ROWS):
                part = slice(start, start + STATISTICS_ROWS)
                ready = preprocess({name: cache.observation[name][part].unsqueeze(0) for name in preprocess.specs})
                self.normalizer.update(ready, real[part].unsqueeze(0))
        if self.reward_scaler is not None and not self.reward_scaler.statistics.count:
            weight = torch.ones(1, len(returns.so_far), device=self.device)
            self.reward_scaler.update(returns.so_far.unsqueeze(0), weight)

    @torch.no_grad()
    def with_targets(self, batch: Batch) -> Batch:
        """Add the return to go of each step; where the recording does not end with a termination, V completes it.

        In sequences the value at their end completes it as well.
        """
        if self.recurrent:
            return self.with_sequence_targets(self.with_zero_state(batch))
        target = batch.experience["total"]
        if self.reward_scaler is not None:
            target = self.reward_scaler.scale(target)
        rest = self._final_values(batch) if self.config.value_coef else None
        if rest is not None:
            target = target + batch.experience["discount"] * rest
        return replace(batch, experience={"return": target.float()}, final={})

    def with_sequence_targets(self, batch: Batch) -> Batch:
        """Add the return to go within each sequence ``[T+1, B, …]``."""
        target = torch.zeros_like(batch.reward)
        if self.config.value_coef:
            outputs, _ = self.outputs(batch.observation, batch.state, batch.first, self.value_networks)
            value_t = batch.next_value(outputs["value"].squeeze(-1))
            reward = batch.reward if self.reward_scaler is None else self.reward_scaler.scale(batch.reward)
            target = lambda_returns(reward, batch.discount, batch.continues, value_t, 1.0)
        return replace(batch.without_last_observation(), experience={"return": target})

    def with_zero_state(self, batch: Batch) -> Batch:
        """Let the networks start from their initial hidden state."""
        state = ActorCritic.initial_state(self, batch.reward.shape[1])
        return replace(batch, state=state.map(lambda x: x.to(self.device)))

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
