"""A2C: synchronous advantage actor-critic (Mnih et al. 2016), with n-step returns or GAE (Schulman et al. 2016)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ludus.agents.parameter_noise import adapt_to_kl, perturbed_outputs
from ludus.agents.short_runs import LONG_RUN, larger_learning_rate, smaller_discount
from ludus.core.agent import Agent
from ludus.core.batch import Batch, Learned
from ludus.core.config import AgentConfig, Plan, RunOutline
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec, Shapes
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import OptimizerName, Updater
from ludus.experience.rollout import RolloutCache
from ludus.experience.rollout_unroll import RolloutUnroll
from ludus.exploration.parameter_noise import SEED, ParameterNoise, draw_seeds
from ludus.networks.build import network_spec
from ludus.networks.conditional_policy import make_policy
from ludus.networks.module_checks import uses_methods_of
from ludus.networks.numpy_actor import NumpyActor
from ludus.networks.placement import device_of
from ludus.networks.policy import Policy
from ludus.networks.policy_config import PolicyConfig
from ludus.ops.distributions import perplexity
from ludus.ops.policy_gradient import (
    entropy_loss,
    explained_variance,
    normalize_each,
    policy_gradient_loss,
    share_sum,
    shares_of_each,
    value_loss,
)
from ludus.ops.returns import gae, n_step_returns
from ludus.preprocess.normalization import ObsNormalizer, RewardScaler, unused_normalizer
from ludus.preprocess.observation import ObsPreprocessor

VALUE_ROWS = 4096  # most observations per forward pass of the critic over a rollout, to bound its memory


def with_perplexity(metrics: Tensors) -> Tensors:
    """Add the perplexity of the policy, if the entropy is among the losses."""
    entropy = metrics.get("loss/entropy")
    return metrics if entropy is None else metrics | {"perplexity": perplexity(-entropy)}


def check_minibatches(
    minibatches: int, rollout: int, rows: int, recurrent: bool
) -> Literal["environment", "transition"]:
    """Return what minibatches of a rollout split: transitions, or environments if ``recurrent``; refuse too many."""
    parts = rows if recurrent else rows * rollout
    if minibatches > parts:
        what = f"{rows} environments (a recurrent network splits by environment)"
        what = what if recurrent else f"{parts} transitions (env.num × agent.rollout)"
        raise UserError(f"agent.minibatches is {minibatches}, more than the {what}; lower it to {parts} at most.")
    return "environment" if recurrent else "transition"


@dataclass(frozen=True)
class ActorCriticConfig(PolicyConfig, AgentConfig):
    """Settings of A2C."""

    SCHEDULABLE: ClassVar[tuple[str, ...]] = ("gamma", "gae_lambda")
    learning_rate: float = 7e-4  # raise for speed, lower when the return collapses; larger in short runs
    # linear: falls to 0 at nb_step; constant in short runs
    learning_rate_schedule: Literal["constant", "linear"] = "linear"
    # discount: nearer 1 looks further ahead and learns slower; less in runs below 32,000 steps
    gamma: float = 0.99
    gae_lambda: float = 0.95  # 1: Monte Carlo (less bias); 0: one-step TD (less variance)
    n_step: int = 0  # n-step returns instead of GAE; 0: GAE
    rollout: int = 8  # steps per environment between two updates; fewer in short runs
    entropy_coef: float = 0.01  # raise when the policy becomes deterministic too early
    value_coef: float = 0.5  # weight of the value loss; matters with a shared trunk
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm; 0: never
    optimizer: OptimizerName = "rmsprop"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    weight_decay: float = 0.0  # shrinks weights at each step: adamw apart from the gradient, others as a penalty
    # eps of the optimizer; with rmsprop and 1e-5 the first steps are ten times the learning rate; others: 1e-5
    optimizer_eps: float = 3e-3
    normalize_advantage: bool = False  # to mean 0 and standard deviation 1 over the batch
    normalize_observation: bool = True  # vectors by running mean and standard deviation, saved with the policy
    normalize_reward: bool = True  # by the running standard deviation of the discounted return

    def validate(self) -> None:
        super().validate()
        check_ranges(
            self,
            fraction=("gamma", "gae_lambda"),
            positive=("learning_rate", "rollout", "optimizer_eps"),
            nonnegative=("n_step", "max_grad_norm", "weight_decay", "entropy_coef", "value_coef"),
        )

    def plan(self, rows: int) -> Plan:
        """One optimizer step per rollout."""
        floats = 5 if self.normalize_observation else 0  # measured
        batch = rows * self.rollout
        return Plan(self.rollout, 1, floats, optimizer_steps=1 / batch, batch=batch)

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also ``gae_lambda`` with n-step returns."""
        yield from self.unused_distribution(action)
        yield from unused_normalizer(self, observation)
        if self.n_step:
            yield "gae_lambda", f"agent.n_step is {self.n_step}, and n-step returns take the place of GAE"


class ActorCritic(Agent):
    """A policy and a value function, learned from rollouts with one optimizer step each."""

    Config: type[Any] = ActorCriticConfig
    network_names: tuple[str, ...] = ("actor", "critic", "actor_critic")
    stores_distribution = False

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__()
        self.config = config
        self.networks = nn.ModuleDict(networks)
        self.preprocess = ObsPreprocessor(observation)
        self.policy = self.make_policy(action, config, self.preprocess.shapes)
        self.policy.rename_masks(self.preprocess.masks)
        self.policy.find_conditional_masks(observation)
        if chosen := [name for name in self.policy.over.values() if name in self.preprocess.padded]:
            raise UserError(
                f'agent.heads chooses entities of "{chosen[0]}", to which a pad of preprocess.observation appends '
                "padding, which is no choice; remove the pad."
            )
        if next(iter(networks.values())).orthogonal:  # of the actor
            self.policy.initialize()
        self.normalizer = ObsNormalizer(self.preprocess.outputs) if config.normalize_observation else None
        self.reward_scaler = RewardScaler() if config.normalize_reward else None
        self.recurrent = any(network.recurrent for network in networks.values())
        # A separate feed-forward critic is not run while acting: learn computes the values of the whole rollout.
        self.acting_networks = [name for name, network in networks.items() if name != "critic" or network.recurrent]
        self.value_networks = [name for name in networks if name != "actor"]
        self.masked = len(self.preprocess.specs) < len(observation)
        self._numpy: NumpyActor | None = None
        self.tracks_value = False
        self.parameter_noise: ParameterNoise | None = None  # of the policy's network

    @staticmethod
    def make_policy(action: Specs, config: Any, inputs: Shapes) -> Policy:
        """Make the policy, which defines the network's outputs; ``inputs`` are the preprocessed observations."""
        return make_policy(action, config, inputs)

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for one network with policy and value, or one for each."""
        spec = network_spec(observation, {})
        policy = cls.make_policy(action, config, spec.inputs)
        actor = spec._replace(outputs=policy.outputs, over=policy.over)
        value: Shapes = {"value": (1,)}
        if shared:
            return {"actor_critic": actor._replace(outputs=policy.outputs | value)}
        return {"actor": actor, "critic": spec._replace(outputs=value)}

    @classmethod
    def adapt_defaults(cls, config: Any, run: RunOutline) -> dict[str, Any]:
        """Give short runs at least 500 updates and a larger learning rate; recurrent networks keep the rollout.

        Runs below 32,000 steps have a smaller discount. The default eps is for RMSprop and too large for
        other optimizers.
        """
        eps = {} if config.optimizer == "rmsprop" else {"optimizer_eps": 1e-5}
        if run.nb_step >= LONG_RUN:
            return eps
        shorter = min(config.rollout, max(1, run.nb_step // (500 * run.environments)))
        return eps | {
            "gamma": smaller_discount(config.gamma, run.nb_step),
            "rollout": config.rollout if run.recurrent else shorter,
            "learning_rate": larger_learning_rate(config.learning_rate, run.nb_step, largest=2e-3),
            "learning_rate_schedule": "constant",
        }

    @property
    def action_transform(self) -> Mapping[str, str]:
        return self.policy.action_transform

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return device_of(self)

    def use_numpy(self) -> bool:
        """Act in numpy where the networks are plain MLPs on the CPU and nothing is overridden."""
        ours = uses_methods_of(self, ActorCritic, ("act", "_act", "experience", "inputs", "outputs", "acting_outputs"))
        if self.masked or self.stores_distribution or self.parameter_noise is not None or not ours:
            return False
        acting = {name: self.networks[name] for name in self.acting_networks}
        self._numpy = NumpyActor.build(acting, self.policy, self.preprocess, self.normalizer)
        return self._numpy is not None

    def initial_state(self, batch: int) -> HiddenState:
        """Return zeros, named network/place/name."""
        state = HiddenState()
        for name, network in self.networks.items():
            state |= network.initial_state(batch).with_prefix(name)  # type: ignore[operator]
        return state

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Draw the policy's noise for many steps at once, within a bound on memory."""
        numbers = rows.total * sum(x.numel() for x in self.policy.draw(1, 1, torch.Generator()).values())
        chunk = self.policy.noise_steps or max(1, min(128, 2**22 // numbers))

        def draw(steps: int, g: torch.Generator) -> Tensors:
            drawn = self.policy.draw(steps, rows.total, g)
            return drawn if self.parameter_noise is None else drawn | {SEED: draw_seeds(steps, rows.total, g)}

        return Noise(draw, generator, rows, chunk)

    def make_cache(self, rows: Rows) -> RolloutCache:
        """Make a cache of one rollout."""
        config = self.config
        return RolloutCache(config.rollout, rows.size, self.given_gamma, self.device, config.normalize_reward)

    def make_unroll(self, rows: Rows, memory: Tensors | None = None) -> RolloutUnroll:
        config = self.config
        return RolloutUnroll(config.rollout, rows, self.given_gamma, self.device, config.normalize_reward, memory)

    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Sample with ``noise``, else take the mode; the experience is log_prob, and value if acting computes it."""
        if self._numpy is not None and self._numpy.usable():
            return self._numpy.act(step, state, noise)
        return self._act(step, state, noise)

    @torch.inference_mode()
    def _act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> AgentStep:
        observation = {name: x.unsqueeze(0) for name, x in step.observation.items()}
        names = [n for n in self.acting_networks if noise is not None or n != "critic" or self.tracks_value]
        outputs, state = self.acting_outputs(observation, state, step.first.unsqueeze(0), names, noise)
        outputs = {name: x.squeeze(0) for name, x in outputs.items()}
        action, log_prob = self.policy.sample(outputs, step.observation, noise)
        if noise is None:
            return AgentStep(action, {}, state)
        return AgentStep(action, self.experience(outputs, step.observation, action, log_prob), state)

    def track_critic_state(self) -> None:
        self.tracks_value = "critic" in self.networks and bool(self.networks["critic"].recurrent)

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return V of each observation in the environment's rewards."""
        return self.unscale_value(self._outputs_without(step, state, without="actor")["value"].squeeze(-1))

    @torch.inference_mode()
    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Return the parameters of the policy's distributions."""
        return self.policy.describe(self._outputs_without(step, state, without="critic"), step.observation)

    def unscale_value(self, value: Tensor) -> Tensor:
        """Undo the reward scale."""
        return value if self.reward_scaler is None else value / self.reward_scaler.statistics.scale.to(value.dtype)

    def _outputs_without(self, step: EnvStep, state: HiddenState, without: str) -> Tensors:
        """Return the outputs ``[B, …]`` of all networks but one."""
        observation = {name: x.unsqueeze(0) for name, x in step.observation.items()}
        names = [name for name in self.networks if name != without]
        outputs, _ = self.outputs(observation, state, step.first.unsqueeze(0), names)
        return {name: x.squeeze(0) for name, x in outputs.items()}

    def experience(self, outputs: Tensors, observation: Tensors, action: Tensors, log_prob: Tensor) -> Tensors:
        """Return what the learner needs of acting, ``[B]`` each; with the distribution for an exact KL."""
        kept = {"log_prob": log_prob}
        if "value" in outputs:
            kept["value"] = outputs["value"].squeeze(-1)
        if self.stores_distribution:
            old = self.policy.distribution(outputs, action, observation)
            kept |= {f"old/{name}": x for name, x in old.items()}
        return kept

    def inputs(self, observation: Tensors) -> Tensors:
        """Preprocess and normalize raw observations ``[T, B, …]`` for the networks."""
        ready: Tensors = self.preprocess(observation)
        return ready if self.normalizer is None else self.normalizer(ready)

    def outputs(
        self, observation: Tensors, state: HiddenState, first: Tensor, names: list[str] | None = None
    ) -> tuple[Tensors, HiddenState]:
        """Run the networks (all, or those in ``names``) on raw observations ``[T, B, …]``."""
        ready, after = self.inputs(observation), HiddenState(state)
        outputs: Tensors = {}
        for name in names or self.networks:
            given, new = self.networks[name](ready, state.select(name) if state else state, first)
            outputs |= given
            if new:
                after |= new.with_prefix(name)
        return outputs, after

    def acting_outputs(
        self, observation: Tensors, state: HiddenState, first: Tensor, names: list[str], noise: Tensors | None
    ) -> tuple[Tensors, HiddenState]:
        """Run the networks on ``[1, B, …]`` to act; in training with parameter noise, the policy is perturbed."""
        outputs, after = self.outputs(observation, state, first, names)
        if noise is not None and self.parameter_noise is not None and self.training:
            outputs |= perturbed_outputs(self, observation, state, first, noise)
        return outputs, after

    @torch.no_grad()
    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Scale the rewards and add ``value``, ``advantage`` and ``return``."""
        values = self._values(batch)
        value, value_t = values[:-1], batch.next_value(values, self._final_values(batch))
        reward = self.scaled_reward(batch, sum_over_ranks)
        if self.config.n_step:
            target = n_step_returns(reward, batch.discount, batch.continues, value_t, self.config.n_step)
            advantage = target - value
        else:
            advantage = gae(reward, batch.discount, batch.continues, value, value_t, self.config.gae_lambda)
            target = advantage + value
        added = {"value": value, "advantage": advantage, "return": target}
        return replace(batch, experience=batch.experience | added)

    def _values(self, batch: Batch) -> Tensor:
        """Return V of all observations ``[T+1, B]``; only the last is computed where acting stored the others."""
        stored = batch.experience.get("value")
        values, state = ([], HiddenState()) if stored is None else ([stored], batch.last_state)
        steps = max(1, VALUE_ROWS // batch.first.shape[1])
        for start in range(0 if stored is None else len(stored), len(batch.first), steps):
            observation = {name: x[start : start + steps] for name, x in batch.observation.items()}
            outputs, _ = self.outputs(observation, state, batch.first[start : start + steps], self.value_networks)
            values.append(outputs["value"].squeeze(-1))
        return torch.cat(values)

    @torch.inference_mode()
    def final_value(self, final: Tensors, state: HiddenState) -> Tensor | None:
        """Return V of episodes' last observations for recurrent critics, before the reset clears the state."""
        recurrent = any(self.networks[name].recurrent for name in self.value_networks)
        return self._value_of(final, state) if recurrent else None

    def _final_values(self, batch: Batch) -> Tensor | None:
        """Return V of ``batch.final`` ``[T, B]``; recurrent networks stored it while acting."""
        if not batch.final:
            return batch.experience.get("final_value")
        final = {name: x.flatten(0, 1) for name, x in batch.final.items()}
        return self._value_of(final, HiddenState()).view_as(batch.reward)

    def _value_of(self, observation: Tensors, state: HiddenState) -> Tensor:
        """Return V of observations ``[B, …]`` that do not begin an episode, in scaled rewards."""
        step = {name: x.unsqueeze(0) for name, x in observation.items()}
        rows = len(next(iter(observation.values())))
        first = torch.zeros(1, rows, dtype=torch.bool, device=self.device)
        outputs, _ = self.outputs(step, state, first, self.value_networks)
        return outputs["value"][0].squeeze(-1)

    def scaled_reward(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Tensor:
        """Return the scaled rewards ``[T, B]``; a fresh rollout updates the scale first, a replayed one does not."""
        if self.reward_scaler is None:
            return batch.reward
        if batch.index is None:  # before it is applied, so that the first rollout is scaled too
            self.reward_scaler.update(batch.row_state["return"], batch.real, sum_over_ranks)
        return self.reward_scaler.scale(batch.reward)

    def with_shares(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Add each row's ``share`` of a mean over real rows; normalize the advantages if the settings say so."""
        return self.each_with_shares([batch], sum_over_ranks)[0]

    @torch.no_grad()
    def each_with_shares(self, batches: Sequence[Batch], sum_over_ranks: SumOverRanks = single_rank) -> list[Batch]:
        """Do what ``with_shares`` does to each of several minibatches, by one sum over ranks."""
        advantages = [batch.experience["advantage"] for batch in batches]
        real = [batch.real.to(x.dtype) for batch, x in zip(batches, advantages, strict=True)]
        if self.config.normalize_advantage:
            advantages, share = normalize_each(advantages, real, sum_over_ranks=sum_over_ranks)
        else:
            share = shares_of_each(real, sum_over_ranks)
        return [
            replace(batch, share=of_rows, experience=batch.experience | {"advantage": advantage})
            for batch, of_rows, advantage in zip(batches, share, advantages, strict=True)
        ]

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return policy gradient, value and entropy losses of a batch ``with_shares``."""
        terms, value = self.evaluate(batch)
        advantage, share = batch.experience["advantage"], batch.share
        losses = {
            "policy": share_sum(policy_gradient_loss(terms["log_prob"], advantage), share),
            "value": share_sum(value_loss(value, batch.experience["return"]), share),
            "entropy": share_sum(entropy_loss(terms["entropy"]), share),
        }
        return losses, {}

    def evaluate(self, batch: Batch) -> tuple[Tensors, Tensor]:
        """Return log-probability and entropy of the batch's actions, and values, ``[T, B]`` each."""
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first)
        return self.policy.evaluate(outputs, batch.action, batch.observation), outputs["value"].squeeze(-1)

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Take one optimizer step on the whole rollout."""
        prepared = self.prepare(batch, updater.sum)
        rows = self.with_shares(prepared.without_last_observation(), updater.sum)
        metrics = with_perplexity(updater.step(self.compute_loss, rows, "all"))
        self.update_statistics(batch, updater.sum)
        value, target = prepared.experience["value"], prepared.experience["return"]
        metrics["explained_variance"] = explained_variance(value, target, prepared.real, updater.sum)
        return Learned(metrics)

    @torch.no_grad()
    def update_statistics(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> None:
        """Update the observation normalizer from real rows, and adapt parameter noise, after learning."""
        if self.parameter_noise is not None:
            adapt_to_kl(self, batch, sum_over_ranks)
        if self.normalizer is not None:
            rows = {name: x[:-1] for name, x in batch.observation.items()}
            self.normalizer.update(self.preprocess(rows), batch.real, sum_over_ranks)

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Also return the scale of parameter noise."""
        values = super().schedule(progress)
        if self.parameter_noise is None:
            return values
        return {**values, "parameter_noise_sigma": float(self.parameter_noise.sigma)}

    def acting_state(self) -> Tensors:
        """Leave out the perturbed network, which every worker draws itself."""
        return {k: x for k, x in super().acting_state().items() if not k.startswith("parameter_noise.perturbed.")}
