"""V-trace: actor-critic with off-policy targets, the learner of IMPALA (Espeholt et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ludus.agents.actor_critic import ActorCritic, ActorCriticConfig
from ludus.agents.parameter_noise import add_parameter_noise
from ludus.core.batch import Batch
from ludus.core.config import AgentConfig
from ludus.core.errors import check_ranges
from ludus.core.network import Network
from ludus.core.spec import Specs
from ludus.core.types import SumOverRanks, single_rank
from ludus.core.updater import OptimizerName
from ludus.networks.policy_config import PolicyConfig
from ludus.ops.vtrace import vtrace
from ludus.preprocess.normalization import unused_normalizer


@dataclass(frozen=True)
class VTraceConfig(PolicyConfig, AgentConfig):
    """Settings of the actor-critic with V-trace targets."""

    SCHEDULABLE = ("gamma", "trace_lambda", "rho_clip", "c_clip", "parameter_noise")
    learning_rate: float = 7e-4  # raise for speed, lower when the return collapses; larger in short runs
    # linear: falls to 0 at nb_step; constant in short runs
    learning_rate_schedule: Literal["constant", "linear"] = "linear"
    # discount: nearer 1 looks further ahead and learns slower; less in runs below 32,000 steps
    gamma: float = 0.99
    trace_lambda: float = 0.95  # how far targets look along the rollout; lower: less variance, more bias
    rho_clip: float = 1.0  # largest importance ratio of targets and advantages; higher: less bias, more variance
    c_clip: float = 1.0  # largest importance ratio of the trace: how far corrections reach back
    rollout: int = 8  # steps per environment between two updates; fewer in short runs
    entropy_coef: float = 0.01  # raise when the policy becomes deterministic too early
    value_coef: float = 0.5  # weight of the value loss; matters with a shared trunk
    # noise on the policy's parameters besides sampling, adapted so that the KL of both policies is this, such as 0.01
    parameter_noise: float = 0.0
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm; 0: never
    optimizer: OptimizerName = "rmsprop"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    weight_decay: float = 0.0  # shrinks weights at each step: adamw apart from the gradient, others as a penalty
    optimizer_eps: float = 3e-3  # raise for smoother steps; 1e-5 for other optimizers than rmsprop
    normalize_advantage: bool = False  # to mean 0 and standard deviation 1 over the batch
    normalize_observation: bool = True  # vectors by running mean and standard deviation, saved with the policy
    normalize_reward: bool = True  # by the running standard deviation of the discounted return

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(
            self,
            fraction=("gamma", "trace_lambda"),
            positive=("learning_rate", "rollout", "optimizer_eps", "rho_clip", "c_clip"),
            nonnegative=("max_grad_norm", "weight_decay", "entropy_coef", "value_coef", "parameter_noise"),
        )

    plan = ActorCriticConfig.plan

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Settings of continuous actions and normalizers that do nothing."""
        yield from self.unused_distribution(action)
        yield from unused_normalizer(self, observation)


class ActorCriticVTrace(ActorCritic):
    """A2C with off-policy correction: the policy that acted may be some updates older than the learner's."""

    Config: type[Any] = VTraceConfig
    corrects_old_unrolls = True

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks, batch)
        add_parameter_noise(self, config.parameter_noise)

    @torch.no_grad()
    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Add ``value``, ``advantage`` and ``return``, from the current values and policy."""
        return prepare_vtrace(self, batch, self.config.trace_lambda, self.config.rho_clip, sum_over_ranks)


def prepare_vtrace(
    agent: ActorCritic, batch: Batch, trace_lambda: float, pg_rho_bar: float | None, sum_over_ranks: SumOverRanks
) -> Batch:
    """Do what ``ActorCritic.prepare`` does by V-trace: the policy that acted may be some updates old.

    The agent's settings must have ``rho_clip`` and ``c_clip``; ``pg_rho_bar`` is as in ``ludus.ops.vtrace``.
    """
    outputs, _ = agent.outputs(batch.observation, batch.state, batch.first)
    values = outputs["value"].squeeze(-1)  # [T+1, B]
    taken = {name: x[:-1] for name, x in outputs.items()}
    observation = {name: x[:-1] for name, x in batch.observation.items()}
    log_ratio = agent.policy.evaluate(taken, batch.action, observation)["log_prob"] - batch.experience["log_prob"]
    corrected = vtrace(
        log_ratio,
        agent.scaled_reward(batch, sum_over_ranks),
        batch.discount,
        batch.continues,
        values[:-1],
        batch.next_value(values, agent._final_values(batch)),
        rho_bar=agent.config.rho_clip,
        c_bar=agent.config.c_clip,
        lambda_=trace_lambda,
        pg_rho_bar=pg_rho_bar,
    )
    added = {"advantage": corrected.advantage, "return": corrected.target, "value": values[:-1]}
    return replace(batch, experience=batch.experience | added)
