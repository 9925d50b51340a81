"""REINFORCE: the policy gradient of whole episodes (Williams 1992), with or without a learned baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import not_
from typing import Any, Literal

import torch
from torch import Tensor

from ludus.agents.actor_critic import ActorCritic
from ludus.core.batch import Batch
from ludus.core.cache import CacheWriter
from ludus.core.config import RunOutline, UnusedSetting
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.step import EnvStep
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import OptimizerName
from ludus.experience.episodes import EpisodeCache, EpisodeConfig
from ludus.networks.policy_config import PolicyConfig
from ludus.ops.policy_gradient import entropy_loss, policy_gradient_loss, share_sum
from ludus.ops.returns import lambda_returns
from ludus.preprocess.normalization import unused_normalizer


@dataclass(frozen=True)
class REINFORCEConfig(PolicyConfig, EpisodeConfig):
    """Settings of REINFORCE."""

    SCHEDULABLE = ("gamma",)
    UNUSED = (UnusedSetting("value_coef", "baseline", not_, "agent.baseline is off, so no value is learned"),)
    # subtract a learned value from the returns, which reduces their variance, and bootstrap from it at time limits
    baseline: bool = True
    learning_rate: float = 2e-3  # raise for speed, lower when the return collapses
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    entropy_coef: float = 0.0  # raise when the policy becomes deterministic too early
    value_coef: float = 0.5  # weight of the baseline's loss; matters with a shared trunk
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm; 0: never
    optimizer: OptimizerName = "adam"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    weight_decay: float = 0.0  # shrinks weights at each step: adamw apart from the gradient, others as a penalty
    optimizer_eps: float = 1e-5  # eps of the optimizer; raise for smoother steps
    normalize_advantage: bool = True  # returns minus baseline to mean 0 and standard deviation 1 over the batch
    normalize_observation: bool = True  # vectors by running mean and standard deviation, saved with the policy
    normalize_reward: bool = True  # by the running standard deviation of the discounted return

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(
            self,
            fraction=("gamma",),
            positive=("episodes", "learning_rate", "optimizer_eps"),
            nonnegative=("entropy_coef", "value_coef", "max_grad_norm", "weight_decay"),
        )

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also settings of distributions and normalizers that do nothing."""
        yield from super().unused(observation, action, rows)
        yield from self.unused_distribution(action)
        yield from unused_normalizer(self, observation)


class REINFORCE(ActorCritic):
    """One optimizer step on the next whole episodes of every environment, weighted by the returns that followed."""

    Config: type[Any] = REINFORCEConfig

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for a policy, and for a value if there is a baseline."""
        if config.baseline:
            return super().requirements(observation, action, config, shared)
        return {"actor": super().requirements(observation, action, config, shared=False)["actor"]}

    @classmethod
    def adapt_defaults(cls, config: Any, run: RunOutline) -> dict[str, Any]:
        """Keep the defaults."""
        return {}

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks, batch)
        self.observation, self.action = observation, action

    def make_cache(self, rows: Rows) -> EpisodeCache:  # type: ignore[override]
        """Make a cache of whole episodes."""
        config, specs = self.config, (self.observation, self.action)
        return EpisodeCache(config.episodes, rows.size, self.given_gamma, *specs, self.device, config.normalize_reward)

    def make_unroll(self, rows: Rows, memory: Tensors | None = None) -> CacheWriter:  # type: ignore[override]
        """Refuse: unrolls are parts of episodes."""
        raise UserError("reinforce learns from whole episodes, not from workers' unrolls; use vtrace, ppo or a2c.")

    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return the baseline in the environment's rewards."""
        if not self.config.baseline:
            raise UserError("REINFORCE has no value function without a baseline (agent.baseline).")
        return super().value(step, state)

    @torch.no_grad()
    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Scale the rewards and add ``value``, ``return`` and ``advantage``, their difference.

        Without a baseline values are 0, and the return of an episode ends where it was cut.
        """
        values = torch.zeros(batch.first.shape, device=self.device)
        final = None
        if self.config.baseline:  # episodes are whole, so that recurrent networks begin with their reset
            outputs, _ = self.outputs(batch.observation, batch.state, batch.first, self.value_networks)
            values, final = outputs["value"].squeeze(-1), self._final_values(batch)
        reward, value_t = self.scaled_reward(batch, sum_over_ranks), batch.next_value(values, final)
        returns = lambda_returns(reward, batch.discount, batch.continues, value_t, 1.0)
        added = {"value": values[:-1], "return": returns, "advantage": returns - values[:-1]}
        return replace(batch, experience=batch.experience | added)

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the losses of policy, entropy and baseline of a batch ``with_shares``."""
        if self.config.baseline:
            return super().compute_loss(batch)
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first)
        terms = self.policy.evaluate(outputs, batch.action, batch.observation)
        losses = {
            "policy": share_sum(policy_gradient_loss(terms["log_prob"], batch.experience["advantage"]), batch.share),
            "entropy": share_sum(entropy_loss(terms["entropy"]), batch.share),
        }
        return losses, {}
