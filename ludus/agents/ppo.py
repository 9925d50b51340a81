"""PPO: proximal policy optimization with a clipped objective (Schulman et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor

from ludus.agents.actor_critic import (
    LONG_RUN,
    ActorCritic,
    ActorCriticConfig,
    larger_learning_rate,
    unused_distribution,
    unused_normalizer,
)
from ludus.core.batch import Batch, Learned
from ludus.core.config import AgentConfig, Plan
from ludus.core.errors import UserError
from ludus.core.network import Network
from ludus.core.spec import Specs
from ludus.core.types import Tensors
from ludus.core.updater import OptimizerName, Updater
from ludus.ops.optimizers import kl_adaptive_lr
from ludus.ops.policy_gradient import (
    approx_kl,
    clip_fraction,
    clipped_value_loss,
    entropy_loss,
    ppo_clip_loss,
    share_sum,
    value_loss,
)


@dataclass(frozen=True)
class PPOConfig(AgentConfig):
    """Settings of PPO."""

    learning_rate: float = 3e-4  # raise for speed, lower when the return collapses; larger in short runs
    # linear: falls to 0 at nb_step; kl: moves to keep target_kl
    learning_rate_schedule: Literal["constant", "linear", "kl"] = "constant"
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    gae_lambda: float = 0.95  # 1: Monte Carlo (less bias); 0: one-step TD (less variance)
    rollout: int = 128  # steps per environment between two learnings; fewer in short runs
    # passes over each rollout: raise for sample efficiency, lower for stability and speed; 8 in short runs
    epochs: int = 4
    minibatches: int = 4  # parts of a rollout, one optimizer step each
    clip: float = 0.2  # how far a step may move the policy's probability ratios from 1
    clip_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    value_clip: float = 0.0  # the same for values, in units of the return; 0: off
    normalize_advantage: bool = True  # mean 0 and deviation 1 per minibatch
    entropy_coef: float = 0.0  # raise when the policy settles too early
    value_coef: float = 0.5  # weight of the value loss; matters with a shared trunk
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm; 0: never
    # schedule kl: the KL per minibatch to keep; else stop a rollout's learning above 1.5 × this; 0: off
    target_kl: float = 0.0
    optimizer: OptimizerName = "adam"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    weight_decay: float = 0.0  # shrinks weights at each step: adamw apart from the gradient, others as a penalty
    optimizer_eps: float = 1e-5  # raise for smoother steps
    normalize_observation: bool = True  # vectors by running mean and deviation, saved with the policy
    normalize_reward: bool = True  # by the running deviation of the discounted return
    distribution: Literal["gaussian", "tanh", "beta"] = "gaussian"  # of continuous actions
    log_std_init: float = 0.0  # the Gaussian's first log deviation, in units where the action range is [-1, 1]

    validate_base = ActorCriticConfig.validate

    def validate(self) -> None:
        """Refuse values that cannot train."""
        self.validate_base()  # type: ignore[misc]
        if self.learning_rate_schedule == "kl" and not self.target_kl:
            raise UserError("agent.learning_rate_schedule is kl, which needs agent.target_kl (0.01 is usual).")
        if self.learning_rate_schedule == "kl" and self.epochs * self.minibatches == 1:
            raise UserError(
                "agent.learning_rate_schedule is kl, but agent.epochs and agent.minibatches are 1: the KL is measured "
                "from the second step on each rollout; raise one of them."
            )

    def plan(self, rows: int) -> Plan:
        """Epochs × minibatches optimizer steps per rollout."""
        copies, floats = 3 if self.minibatches > 1 else 1, 5 if self.normalize_observation else 0  # measured
        steps = self.epochs * self.minibatches / (rows * self.rollout)
        return Plan(self.rollout, copies, floats, optimizer_steps=steps)

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """What continuous actions or normalizers would read."""
        yield from unused_distribution(self, action)
        yield from unused_normalizer(self, observation)


class PPO(ActorCritic):
    """Several epochs of clipped steps on minibatches of each rollout."""

    Config: type[Any] = PPOConfig

    @classmethod
    def adapt_defaults(cls, config: Any, nb_step: int, environments: int, recurrent: bool) -> dict[str, Any]:
        """Give short runs 50 rollouts or more, more epochs and larger steps.

        No rollout has less than 8 steps (32 for a recurrent network, which learns over whole rollouts), nor less than
        16 rows for each minibatch.
        """
        if nb_step >= LONG_RUN:
            return {}
        shortest = max(32 if recurrent else 8, ceil(16 * config.minibatches / environments))
        return {
            "rollout": min(config.rollout, max(shortest, nb_step // (50 * environments))),
            "epochs": 8,
            "learning_rate": larger_learning_rate(config.learning_rate, nb_step, largest=1.5e-3),
        }

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks, batch)
        self.keeps_distribution = config.learning_rate_schedule == "kl"
        self.by: Literal["environment", "transition"] = "environment" if self.recurrent else "transition"
        parts = batch if self.recurrent else batch * config.rollout
        if config.minibatches > parts:
            what = f"{batch} environments (a recurrent network splits by environment)"
            what = what if self.recurrent else f"{parts} transitions (env.num × agent.rollout)"
            raise UserError(
                f"agent.minibatches is {config.minibatches}, more than the {what}; lower it to {parts} at most."
            )
        self.clip: Tensor
        self.register_buffer("clip", torch.tensor(config.clip), persistent=False)
        self.generator = torch.Generator()  # of minibatches; the container seeds it

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Epochs × minibatches, a new permutation each epoch; stops or moves the step size by the KL, if told to."""
        config = self.config
        prepared = self.prepare(batch, updater.sum)
        learned: list[Tensors] = []
        whole = None  # a rollout in one part is made ready once for all epochs
        if config.minibatches == 1:
            whole = [self.weigh(part, updater.sum) for part in prepared.minibatches(1, self.by, self.generator)]
        for _ in range(config.epochs):
            for part in whole or prepared.minibatches(config.minibatches, self.by, self.generator):
                weighed = part if whole else self.weigh(part, updater.sum)
                metrics = updater.step(self.compute_loss, weighed, "all")
                learned.append(metrics)
                # a minibatch's KL is measured before its step; on the first one no step has been taken, so it is 0
                # but for rounding and says nothing of the step size
                if config.learning_rate_schedule == "kl" and len(learned) > 1:
                    updater.learning_rate = kl_adaptive_lr(
                        updater.learning_rate, float(metrics["kl"]), config.target_kl
                    )
            if config.target_kl and config.learning_rate_schedule != "kl" and self._moved_too_far(learned):
                break
        self.observe(batch, updater.sum)
        rows = torch.stack([x for metrics in learned for x in metrics.values()]).view(len(learned), -1)
        means = dict(zip(learned[0], rows.double().mean(0).float().unbind(), strict=True))
        return Learned(means | {"optimizer_steps": torch.tensor(float(len(learned)))} | self.fit(prepared, updater.sum))

    def _moved_too_far(self, learned: list[Tensors]) -> bool:
        epoch = torch.stack([m["kl"] for m in learned[-self.config.minibatches :]])
        return bool(epoch.mean() > 1.5 * self.config.target_kl)

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """The clipped objective, value and entropy losses of what ``weigh`` returned."""
        config, old, share = self.config, batch.experience, batch.share
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first)
        terms = self.policy.evaluate(outputs, batch.action, batch.observation)
        value = outputs["value"].squeeze(-1)
        log_ratio = terms["log_prob"] - old["log_prob"]
        if config.value_clip:
            value_losses = clipped_value_loss(value, old["value"], old["return"], config.value_clip)
        else:
            value_losses = value_loss(value, old["return"])
        losses = {
            "policy": share_sum(ppo_clip_loss(log_ratio, old["advantage"], self.clip), share),
            "value": share_sum(value_losses, share),
            "entropy": share_sum(entropy_loss(terms["entropy"]), share),
        }
        with torch.no_grad():
            metrics = {
                "kl": share_sum(self._kl(outputs, log_ratio, batch), share),
                "clip_fraction": share_sum(clip_fraction(log_ratio, self.clip), share),
            }
        return losses, metrics

    def _kl(self, outputs: Tensors, log_ratio: Tensor, batch: Batch) -> Tensor:
        if not self.keeps_distribution:
            return approx_kl(log_ratio)
        old = {name.removeprefix("old/"): x for name, x in batch.experience.items() if name.startswith("old/")}
        return self.policy.kl(old, outputs, batch.observation)

    def schedule(self, progress: float) -> Mapping[str, float]:
        """The learning rate and the clip at this share of the run."""
        left = max(1 - progress, 0.0)
        if self.config.clip_schedule == "linear":
            self.clip.fill_(self.config.clip * left)
        return super().schedule(progress)
