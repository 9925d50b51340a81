"""PPO: proximal policy optimization with a clipped objective (Schulman et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor

from ludus.agents.actor_critic import ActorCritic, ActorCriticConfig, check_minibatches, with_perplexity
from ludus.agents.parameter_noise import add_parameter_noise
from ludus.agents.short_runs import LONG_RUN, larger_learning_rate
from ludus.agents.vtrace import prepare_vtrace
from ludus.core.batch import Batch, Learned
from ludus.core.config import Plan, RunOutline
from ludus.core.errors import UserError, check_ranges
from ludus.core.network import Network
from ludus.core.spec import Specs
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import OptimizerName, Updater
from ludus.ops.optimizers import kl_adaptive_lr
from ludus.ops.policy_gradient import (
    approx_kl,
    clip_fraction,
    clipped_value_loss,
    entropy_loss,
    explained_variance,
    ppo_clip_loss,
    share_sum,
    value_loss,
)


@dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Settings of PPO: those of A2C with other defaults, and its own."""

    SCHEDULABLE = (
        *ActorCriticConfig.SCHEDULABLE,
        "clip",
        "value_clip",
        "target_kl",
        "rho_clip",
        "c_clip",
        "parameter_noise",
    )
    # raise for speed, lower when the return collapses; larger in short runs without images
    learning_rate: float = 3e-4
    # linear: falls to 0 at nb_step; kl: adapts to keep target_kl
    learning_rate_schedule: Literal["constant", "linear", "kl"] = "constant"  # type: ignore[assignment]
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    rollout: int = 128  # steps per environment and rollout; fewer in short runs
    # passes over each rollout: raise for sample efficiency, lower for stability and speed; 8 in short runs
    epochs: int = 4
    minibatches: int = 4  # minibatches per epoch, one optimizer step each
    clip: float = 0.2  # clip range of the probability ratio: lower for smaller policy updates
    clip_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    value_clip: float = 0.0  # clip range of the value function, in units of the return; 0: off
    # schedule kl: the KL per minibatch to keep; else stop the epochs above 1.5 × this; 0: off
    target_kl: float = 0.0
    normalize_advantage: bool = True  # to mean 0 and standard deviation 1 per minibatch
    # advantages and returns by V-trace with gae_lambda, for unrolls of older policies (APPO), as of --container impala
    vtrace: bool = False
    rho_clip: float = 1.0  # V-trace: largest importance ratio of targets; higher: less bias, more variance
    c_clip: float = 1.0  # V-trace: largest importance ratio of the trace: how far corrections reach back
    entropy_coef: float = 0.0  # raise when the policy becomes deterministic too early
    # noise on the policy's parameters besides sampling, adapted so that the KL of both policies is this, such as 0.01
    parameter_noise: float = 0.0
    optimizer: OptimizerName = "adam"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    optimizer_eps: float = 1e-5  # eps of the optimizer; raise for smoother steps
    log_std_init: float = 0.0  # initial log standard deviation of the Gaussian, for actions scaled to [-1, 1]

    def validate(self) -> None:
        super().validate()
        check_ranges(
            self,
            positive=("epochs", "minibatches", "clip", "rho_clip", "c_clip"),
            nonnegative=("value_clip", "target_kl", "parameter_noise"),
        )
        if self.parameter_noise and self.target_kl:
            raise UserError(
                f"agent.target_kl is {self.target_kl:g}, but with agent.parameter_noise the KL is to the perturbed "
                "policy, however small the steps are; set agent.target_kl to 0."
            )
        if self.learning_rate_schedule == "kl" and not self.target_kl:
            raise UserError("agent.learning_rate_schedule is kl, which needs agent.target_kl (0.01 is usual).")
        if self.vtrace and self.target_kl:
            raise UserError(
                f"agent.target_kl is {self.target_kl:g}, but with agent.vtrace the KL is to a policy that may be some "
                "updates older, however small the steps are; set agent.target_kl to 0."
            )
        if self.learning_rate_schedule == "kl" and self.epochs * self.minibatches == 1:
            raise UserError(
                "agent.learning_rate_schedule is kl, but agent.epochs and agent.minibatches are 1: the KL is measured "
                "from the second step on each rollout; raise one of them."
            )

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also n-step returns with V-trace, and its clips without."""
        yield from super().unused(observation, action, rows)
        if self.vtrace:
            yield "n_step", "agent.vtrace is on, and V-trace takes the place of n-step returns"
        else:
            yield from ((name, "agent.vtrace is off") for name in ("rho_clip", "c_clip"))

    def plan(self, rows: int) -> Plan:
        """Epochs × minibatches optimizer steps per rollout."""
        plan = super().plan(rows)
        copies = 3 if self.minibatches > 1 else 1  # measured
        return plan._replace(
            rollout_copies=copies,
            optimizer_steps=plan.optimizer_steps * self.epochs * self.minibatches,
            batch=plan.batch // self.minibatches,
        )


@dataclass(frozen=True)
class APPOConfig(PPOConfig):
    """Asynchronous PPO: learns from unrolls of older policies, corrected by V-trace."""

    vtrace: bool = True  # advantages and returns by V-trace with gae_lambda, for unrolls of older policies


class PPO(ActorCritic):
    """Several epochs of clipped policy updates on minibatches of each rollout."""

    Config: type[Any] = PPOConfig
    generator: torch.Generator

    @classmethod
    def adapt_defaults(cls, config: Any, run: RunOutline) -> dict[str, Any]:
        """Give short runs at least 50 rollouts, more epochs and a larger learning rate.

        A rollout has at least 8 steps (32 with a recurrent network), and each minibatch 16 transitions. With images the
        learning rate is not larger, since returns collapse more often with it.
        """
        if run.nb_step >= LONG_RUN:
            return {}
        shortest = max(32 if run.recurrent else 8, ceil(16 * config.minibatches / run.environments))
        rate = config.learning_rate
        return {
            "rollout": min(config.rollout, max(shortest, run.nb_step // (50 * run.environments))),
            "epochs": 8,
            "learning_rate": rate if run.images else larger_learning_rate(rate, run.nb_step, largest=1.5e-3),
        }

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks, batch)
        self.stores_distribution = config.learning_rate_schedule == "kl"
        self.by = check_minibatches(config.minibatches, config.rollout, batch, self.recurrent)
        add_parameter_noise(self, config.parameter_noise)
        self.clips_value = bool(config.value_clip)
        self.clip: Tensor
        self.register_buffer("clip", torch.tensor(config.clip), persistent=False)
        self.generator = torch.Generator()  # of minibatches

    @property
    def corrects_old_unrolls(self) -> bool:  # type: ignore[override]
        return bool(self.config.vtrace)

    @torch.no_grad()
    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Use GAE, or V-trace without its weight in the advantage, since the loss has the ratio."""
        if self.config.vtrace:
            return prepare_vtrace(self, batch, self.config.gae_lambda, None, sum_over_ranks)
        return super().prepare(batch, sum_over_ranks)

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Run epochs of minibatches, each with a new permutation; ``target_kl`` may stop them or adapt the rate."""
        config = self.config
        prepared = self.prepare(batch, updater.sum)
        learned: list[Tensors] = []
        parts: list[Batch] = []
        for _ in range(config.epochs):
            if config.minibatches > 1 or not parts:  # a single minibatch is prepared once for all epochs
                drawn = list(prepared.minibatches(config.minibatches, self.by, self.generator))
                parts = self.each_with_shares(drawn, updater.sum)
            for minibatch in parts:
                metrics = updater.step(self.compute_loss, minibatch, "all")
                learned.append(metrics)
                # The KL is measured before the minibatch's step, so that of the first one is rounding noise.
                if config.learning_rate_schedule == "kl" and len(learned) > 1:
                    updater.learning_rate = kl_adaptive_lr(
                        updater.learning_rate, float(metrics["kl"]), config.target_kl
                    )
            if config.target_kl and config.learning_rate_schedule != "kl":
                kl = torch.stack([metrics["kl"] for metrics in learned[-config.minibatches :]]).mean()
                if kl > 1.5 * config.target_kl:
                    break
        self.update_statistics(batch, updater.sum)
        rows = torch.stack([x for metrics in learned for x in metrics.values()]).view(len(learned), -1)
        means = dict(zip(learned[0], rows.double().mean(0).float().unbind(), strict=True))
        means = with_perplexity(means | {"optimizer_steps": torch.tensor(float(len(learned)))})
        value, target = prepared.experience["value"], prepared.experience["return"]
        means["explained_variance"] = explained_variance(value, target, prepared.real, updater.sum)
        return Learned(means)

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the clipped objective, value and entropy losses of a batch ``with_shares``."""
        config, old, share = self.config, batch.experience, batch.share
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first)
        terms, value = self.policy.evaluate(outputs, batch.action, batch.observation), outputs["value"].squeeze(-1)
        log_ratio = terms["log_prob"] - old["log_prob"]
        value_losses = value_loss(value, old["return"])
        if self.clips_value:
            value_losses = clipped_value_loss(value, old["value"], old["return"], config.value_clip)
        losses = {
            "policy": share_sum(ppo_clip_loss(log_ratio, old["advantage"], self.clip), share),
            "value": share_sum(value_losses, share),
            "entropy": share_sum(entropy_loss(terms["entropy"]), share),
        }
        with torch.no_grad():
            kl = approx_kl(log_ratio)
            if self.stores_distribution:
                before = {name.removeprefix("old/"): x for name, x in old.items() if name.startswith("old/")}
                kl = self.policy.kl(before, outputs, batch.action, batch.observation)
            fraction = share_sum(clip_fraction(log_ratio, self.clip), share)
            return losses, {"kl": share_sum(kl, share), "clip_fraction": fraction}

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Also set the clip range."""
        values = super().schedule(progress)
        left = max(1 - progress, 0.0) if self.config.clip_schedule == "linear" else 1.0
        self.clip.fill_(self.config.clip * left)
        return values
