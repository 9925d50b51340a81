"""TRPO: trust region policy optimization by natural gradient steps (Schulman et al. 2015)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ludus.agents.actor_critic import ActorCritic, check_minibatches, with_perplexity
from ludus.agents.parameter_noise import add_parameter_noise
from ludus.agents.short_runs import LONG_RUN
from ludus.core.batch import Batch, Learned
from ludus.core.config import AgentConfig, Plan, RunOutline
from ludus.core.errors import UserError, check_ranges
from ludus.core.network import Network, NetworkSpec
from ludus.core.schedule import value_range
from ludus.core.spec import Specs
from ludus.core.types import Tensors
from ludus.core.updater import Group, NonFiniteError, OptimizerName, Updater, total_loss
from ludus.networks.module_checks import layers_with_modes
from ludus.networks.policy_config import PolicyConfig
from ludus.ops.natural_gradient import Product, conjugate_gradient, line_search, step_to_kl, surrogate_loss
from ludus.ops.policy_gradient import entropy_loss, explained_variance, share_sum, shares_of_each, value_loss
from ludus.preprocess.normalization import unused_normalizer

POLICY, VALUE = "policy", "value"  # parameter groups


@dataclass(frozen=True)
class TRPOConfig(PolicyConfig, AgentConfig):
    """Settings of TRPO."""

    SCHEDULABLE: ClassVar[tuple[str, ...]] = (
        *("gamma", "gae_lambda", "target_kl", "cg_damping", "line_search_shrink", "parameter_noise"),
    )
    target_kl: float = 0.01  # bound on the KL of each policy step: raise for speed, lower when the return collapses
    rollout: int = 256  # steps per environment and policy step; fewer in short runs
    cg_iterations: int = 15  # of conjugate gradients: more come closer to the natural gradient and take longer
    cg_damping: float = 0.1  # added to the diagonal of the Fisher matrix: raise for steps nearer to the plain gradient
    line_search_steps: int = 10  # most shorter steps to try until the KL is within its bound and the objective improves
    line_search_shrink: float = 0.8  # factor from one try to the next
    entropy_coef: float = 0.0  # weight of the entropy in the objective: raise when exploration ends too early
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    gae_lambda: float = 0.95  # 1: Monte Carlo (less bias); 0: one-step TD (less variance)
    n_step: int = 0  # n-step returns instead of GAE; 0: GAE
    learning_rate: float = 1e-3  # of the value function; the size of policy steps is target_kl
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    value_epochs: int = 10  # passes over each rollout to fit the value function
    minibatches: int = 16  # minibatches per epoch of the value function; fewer in short runs
    max_grad_norm: float = 0.0  # gradients of the value function are scaled down to this norm; 0: never
    optimizer: OptimizerName = "adam"  # of the value function; rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    weight_decay: float = 0.0  # of the value function: adamw apart from the gradient, others as a penalty
    optimizer_eps: float = 1e-5  # eps of the optimizer; raise for smoother steps
    normalize_advantage: bool = True  # to mean 0 and standard deviation 1 over the rollout
    normalize_observation: bool = True  # vectors by running mean and standard deviation, saved with the policy
    normalize_reward: bool = True  # by the running standard deviation of the discounted return
    parameter_noise: float = 0.0  # noise on the policy's parameters, adapted to this KL, such as 0.01; 0: off

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(
            self,
            fraction=("gamma", "gae_lambda", "line_search_shrink"),
            positive=(
                *("target_kl", "rollout", "cg_iterations", "line_search_steps", "line_search_shrink"),
                *("learning_rate", "value_epochs", "minibatches", "optimizer_eps"),
            ),
            nonnegative=("cg_damping", "entropy_coef", "n_step", "max_grad_norm", "weight_decay", "parameter_noise"),
        )
        if value_range(self.line_search_shrink)[1] == 1:
            raise UserError(
                f"agent.line_search_shrink is {self.line_search_shrink}, so all steps of the line search would be the "
                "same; it must be less than 1."
            )

    def plan(self, rows: int) -> Plan:
        """Value epochs × minibatches optimizer steps per rollout."""
        floats = 5 if self.normalize_observation else 0
        transitions = rows * self.rollout
        steps = self.value_epochs * self.minibatches / transitions
        return Plan(self.rollout, 3, floats, optimizer_steps=steps, batch=transitions // self.minibatches)

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Settings of distributions and normalizers that do nothing, and ``gae_lambda`` with n-step returns."""
        yield from self.unused_distribution(action)
        yield from unused_normalizer(self, observation)
        if self.n_step:
            yield "gae_lambda", f"agent.n_step is {self.n_step}, and n-step returns take the place of GAE"
        if self.line_search_steps == 1:
            yield "line_search_shrink", "agent.line_search_steps is 1, so no shorter step is tried"


class TRPO(ActorCritic):
    """One natural gradient step of the policy per rollout, within a bound on the KL; the value is fitted apart."""

    Config: type[Any] = TRPOConfig
    network_names: tuple[str, ...] = ("actor", "critic")
    generator: torch.Generator

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for separate networks, since a value step would move a shared trunk out of the trust region."""
        return super().requirements(observation, action, config, shared=False)

    @classmethod
    def adapt_defaults(cls, config: Any, run: RunOutline) -> dict[str, Any]:
        """Give short runs at least 50 policy steps, each from 128 transitions or more, and minibatches of 128.

        Minibatches of a recurrent network are at most as many as environments.
        """
        if run.nb_step >= LONG_RUN:
            return {"minibatches": min(config.minibatches, run.environments)} if run.recurrent else {}
        shortest = max(32 if run.recurrent else 8, ceil(128 / run.environments))
        rollout = min(config.rollout, max(shortest, run.nb_step // (50 * run.environments)))
        parts = run.environments if run.recurrent else rollout * run.environments // 128
        return {"rollout": rollout, "minibatches": max(1, min(config.minibatches, parts))}

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks, batch)
        if changing := layers_with_modes(networks["actor"]):
            raise UserError(
                f"trpo measures how far each step moves the policy, but the actor has {changing[0]}, which makes it "
                'another policy while learning; use norm="layer" and no dropout there (network.actor.*), or ppo.'
            )
        self.by = check_minibatches(config.minibatches, config.rollout, batch, self.recurrent)
        add_parameter_noise(self, config.parameter_noise)
        self.generator = torch.Generator()  # of minibatches

    def parameter_groups(self) -> dict[str, Group]:
        """Return the value function's parameters, which an optimizer steps, and the policy's."""
        policy = (*self.networks["actor"].parameters(), *self.policy.parameters())
        trainable = tuple(p for p in policy if p.requires_grad)
        value = self.make_group(self.networks["critic"].parameters())
        return {VALUE: value, POLICY: Group(trainable, 1.0, optimizer="sgd")}

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Step the policy on the whole rollout, then fit the value function to its returns."""
        prepared = self.prepare(batch, updater.sum)
        metrics = self.step_policy(self.with_shares(prepared.without_last_observation(), updater.sum), updater)
        for _ in range(self.config.value_epochs):
            parts = list(prepared.minibatches(self.config.minibatches, self.by, self.generator))
            share = shares_of_each([part.real.to(part.reward.dtype) for part in parts], updater.sum)
            for part, of_rows in zip(parts, share, strict=True):
                fitted = updater.step(self.critic_loss, replace(part, share=of_rows), VALUE)
        self.update_statistics(batch, updater.sum)
        metrics["loss/value"] = fitted["loss/value"]
        value, target = prepared.experience["value"], prepared.experience["return"]
        metrics["explained_variance"] = explained_variance(value, target, prepared.real, updater.sum)
        return Learned(metrics)

    def step_policy(self, batch: Batch, updater: Updater) -> Tensors:
        """Take the longest step along the natural gradient that improves the objective within the KL bound."""
        config = self.config
        gradient, metrics = updater.gradient(self.policy_loss, batch, POLICY)
        norm: Tensor = torch.linalg.vector_norm(gradient)
        if not norm.isfinite():
            raise NonFiniteError(self.policy_loss, batch, POLICY, metrics)
        batch = self.with_old_policy(batch)
        product = self.fisher_product(batch, updater)
        direction = conjugate_gradient(product, -gradient, config.cg_iterations)
        step, start = step_to_kl(direction, product, config.target_kl), updater.parameters(POLICY).clone()
        old = losses, kl = self.losses_and_kl(batch, updater)
        before = self.objective(losses)

        def improves(fraction: float) -> bool:
            nonlocal losses, kl
            updater.assign(start + fraction * step, POLICY)
            losses, kl = self.losses_and_kl(batch, updater)
            return self.objective(losses) < before and float(kl) <= config.target_kl  # False for a NaN

        fraction = line_search(improves, config.line_search_shrink, config.line_search_steps)
        if not fraction:
            updater.assign(start, POLICY)
            losses, kl = old
        metrics |= {f"loss/{name}": x for name, x in losses.items()}
        return with_perplexity(metrics) | {"kl": kl, "gradient_norm": norm, "step_fraction": torch.tensor(fraction)}

    @torch.no_grad()
    def with_old_policy(self, batch: Batch) -> Batch:
        """Add the parameters of the action distributions before the step."""
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first, ["actor"])
        old = self.policy.distribution(outputs, batch.action, batch.observation)
        return replace(batch, experience=batch.experience | {f"old/{name}": x for name, x in old.items()})

    def fisher_product(self, batch: Batch, updater: Updater) -> Product:
        """Return v → (F + damping·I)v, with F the Fisher matrix: the Hessian of the KL to the old policy.

        The graph of the KL's gradient is built once and differentiated again for each v.
        """
        parameters = self.parameter_groups()[POLICY].parameters
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):  # cuDNN's LSTM has no second derivative
            kl = share_sum(self.kl_to_old(batch), batch.share)
            slope = torch.autograd.grad(kl, parameters, create_graph=True, materialize_grads=True)

        def product(v: Tensor) -> Tensor:
            with torch.enable_grad():
                along = torch.stack([(x * y).sum() for x, y in zip(slope, updater.split(v, POLICY), strict=True)]).sum()
            curvature = torch.autograd.grad(along, parameters, retain_graph=True, materialize_grads=True)
            flat = torch.zeros_like(v)
            torch._foreach_copy_(updater.split(flat, POLICY), list(curvature))
            return updater.sum(flat).add(v, alpha=self.config.cg_damping)

        return product

    @torch.no_grad()
    def losses_and_kl(self, batch: Batch, updater: Updater) -> tuple[Tensors, Tensor]:
        """Return the losses and the KL to the old policy, of the current parameters and over all ranks."""
        losses, _ = self.policy_loss(batch)
        kl = share_sum(self.kl_to_old(batch), batch.share)
        *summed, kl = updater.sum(torch.stack([*losses.values(), kl]))
        return dict(zip(losses, summed, strict=True)), kl

    def objective(self, losses: Tensors) -> float:
        """Return the weighted sum of the policy's losses, which a step must lower."""
        return float(total_loss(losses, self.loss_coefficients()))

    def kl_to_old(self, batch: Batch) -> Tensor:
        """Return KL(old‖new) ``[T, B]`` of a batch ``with_old_policy``."""
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first, ["actor"])
        old = {name.removeprefix("old/"): x for name, x in batch.experience.items() if name.startswith("old/")}
        return self.policy.kl(old, outputs, batch.action, batch.observation)

    def policy_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the surrogate objective and the entropy, both negated."""
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first, ["actor"])
        terms, old = self.policy.evaluate(outputs, batch.action, batch.observation), batch.experience
        loss = surrogate_loss(terms["log_prob"] - old["log_prob"], old["advantage"])
        losses = {
            POLICY: share_sum(loss, batch.share),
            "entropy": share_sum(entropy_loss(terms["entropy"]), batch.share),
        }
        return losses, {}

    def critic_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the squared error of the value function."""
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first, ["critic"])
        error = value_loss(outputs["value"].squeeze(-1), batch.experience["return"])
        return {VALUE: share_sum(error, batch.share)}, {}

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return both losses of a batch ``with_shares``; ``learn`` steps each separately."""
        losses, metrics = self.policy_loss(batch)
        return losses | self.critic_loss(batch)[0], metrics
