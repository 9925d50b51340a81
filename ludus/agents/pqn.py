"""PQN: parallelised Q-learning from rollouts, without a replay buffer or target network (Gallici et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ludus.agents.actor_critic import check_minibatches
from ludus.core.agent import Agent
from ludus.core.batch import Batch, Learned
from ludus.core.config import AgentConfig, Plan, UnusedSetting
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs, mask_name
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import Tensors
from ludus.core.updater import OptimizerName, Updater
from ludus.experience.rollout import RolloutCache
from ludus.exploration.epsilon import Epsilon, epsilon_greedy
from ludus.exploration.parameter_noise import SEED, SIGMA, ParameterNoise, draw_seeds, epsilon_kl, softmax_kl
from ludus.networks.build import network_spec
from ludus.networks.placement import device_of
from ludus.networks.value_heads import number_of_choices
from ludus.ops.distributions import mask_logits
from ludus.ops.policy_gradient import share_sum, shares_of_each, value_loss
from ludus.ops.q_learning import gather_action, greedy, max_q_value
from ludus.ops.returns import lambda_returns
from ludus.preprocess.normalization import ObsNormalizer, unused_normalizer
from ludus.preprocess.observation import ObsPreprocessor

# layer norms keep Q-learning stable without a target network
LAYER_NORM_MLP = MappingProxyType(
    {"net1d": "identity1d", "body": 'mlp(norm="layer")', "hidden": (128, 128), "activation": "relu"}
)


@dataclass(frozen=True)
class PQNConfig(AgentConfig):
    """Settings of PQN."""

    NETWORK_DEFAULTS = LAYER_NORM_MLP
    UNUSED = (
        UnusedSetting(
            "epsilon_end epsilon_share", "epsilon_schedule", "constant".__eq__, "agent.epsilon_schedule is constant"
        ),
    )
    SCHEDULABLE = ("gamma", "trace_lambda", "epsilon_start", "parameter_noise")
    learning_rate: float = 5e-4  # raise for speed, lower when the return collapses
    learning_rate_schedule: Literal["constant", "linear"] = "linear"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    trace_lambda: float = 0.65  # of Q(λ) targets, 0: one step; 1: the whole rollout (less bias, more variance)
    rollout: int = 32  # steps per environment between two updates
    epochs: int = 4  # passes over each rollout: raise for sample efficiency, lower for stability and speed
    minibatches: int = 4  # minibatches per epoch, one optimizer step each
    epsilon_schedule: Literal["linear", "exponential", "constant"] = "linear"  # of ε over the run
    epsilon_start: float = 1.0  # initial ε; with the constant schedule, that of the whole run
    epsilon_end: float = 0.05  # final ε: raise to keep exploring
    epsilon_share: float = 0.1  # share of the run after which epsilon_end is reached
    # noise on the network's parameters besides ε, adapted so that actions differ as if this were ε, such as 0.1; 0: off
    parameter_noise: float = 0.0
    max_grad_norm: float = 10.0  # gradients are scaled down to this norm; 0: never
    optimizer: OptimizerName = "adam"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    weight_decay: float = 0.0  # shrinks weights at each step: adamw apart from the gradient, others as a penalty
    optimizer_eps: float = 1e-8  # raise for smoother steps
    normalize_observation: bool = False  # vectors by running mean and standard deviation, saved with the policy

    def validate(self) -> None:
        """Refuse values that cannot train."""
        check_ranges(
            self,
            fraction=("gamma", "trace_lambda", "parameter_noise"),
            positive=("learning_rate", "rollout", "epochs", "minibatches", "optimizer_eps"),
            nonnegative=("max_grad_norm", "weight_decay"),
        )

    def plan(self, rows: int) -> Plan:
        """Epochs × minibatches optimizer steps per rollout."""
        floats = 5 if self.normalize_observation else 0
        transitions = rows * self.rollout
        steps = self.epochs * self.minibatches / transitions
        return Plan(self.rollout, 3, floats, optimizer_steps=steps, batch=transitions // self.minibatches)

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also ``normalize_observation`` where there is nothing to normalize."""
        yield from super().unused(observation, action, rows)
        yield from unused_normalizer(self, observation)


class PQN(Agent):
    """Q of every choice, learned by several epochs on the Q(λ) targets of each rollout."""

    Config: type[Any] = PQNConfig
    network_names = ("q",)
    generator: torch.Generator

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__()
        self.config = config
        self.networks = nn.ModuleDict(networks)
        self.preprocess = ObsPreprocessor(observation)
        self.normalizer = ObsNormalizer(self.preprocess.outputs) if config.normalize_observation else None
        self.recurrent = networks["q"].recurrent
        self.choices, (self.name,) = number_of_choices(action), action
        self.mask = mask_name(self.name, action) if mask_name(self.name, action) in observation else None
        settings = (config.epsilon_start, config.epsilon_end, config.epsilon_share)
        self.epsilon = Epsilon(config.epsilon_schedule, *settings)
        self.by = check_minibatches(config.minibatches, config.rollout, batch, self.recurrent)
        self.generator = torch.Generator()  # of minibatches
        self.progress = 0.0
        self.parameter_noise = ParameterNoise(networks["q"], SIGMA) if config.parameter_noise else None

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for one network that outputs Q of all choices."""
        return {"q": network_spec(observation, {"q": (number_of_choices(action),)})}

    @property
    def action_transform(self) -> Mapping[str, str]:
        """Pass actions to the environment unchanged."""
        return {}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return device_of(self)

    def initial_state(self, batch: int) -> HiddenState:
        """Return zeros, named q/place/name."""
        state: HiddenState = self.networks["q"].initial_state(batch)  # type: ignore[operator]
        return state.with_prefix("q")

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Draw the numbers of ε-greedy choices."""

        def draw(steps: int, g: torch.Generator) -> Tensors:
            drawn = self.epsilon.draw(steps, rows.total, self.choices, g)
            return drawn if self.parameter_noise is None else drawn | {SEED: draw_seeds(steps, rows.total, g)}

        return Noise(draw, generator, rows)

    def make_cache(self, rows: Rows) -> RolloutCache:
        """Make a cache of one rollout."""
        return RolloutCache(self.config.rollout, rows.size, self.given_gamma, self.device)

    def q(
        self, observation: Tensors, state: HiddenState, first: Tensor, network: nn.Module | None = None
    ) -> tuple[Tensor, HiddenState]:
        """Return Q of every choice for raw observations ``[T, B, …]``, and the next hidden state.

        ``network`` may be a perturbed copy of the network.
        """
        ready = self.preprocess(observation)
        ready = ready if self.normalizer is None else self.normalizer(ready)
        outputs, new = (network or self.networks["q"])(ready, state.select("q") if state else state, first)
        return outputs["q"], new.with_prefix("q") if new else new

    @torch.inference_mode()
    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Return the greedy choice; with ``noise``, ε-greedy, and in training with parameter noise by perturbed Q."""
        perturbed = None
        if noise is not None and self.parameter_noise is not None and self.training:
            perturbed = self.parameter_noise.perturbed
            self.parameter_noise.resample_on_reset(step.first, noise[SEED])
        before = state
        q, state = self._q_of_step(step.observation, before, step.first, perturbed)
        if perturbed is not None and self.recurrent:  # the learner goes on from the state of the network itself
            _, state = self._q_of_step(step.observation, before, step.first)
        mask = self._mask(step.observation)
        if noise is None:
            return AgentStep({self.name: greedy(q, mask)}, {}, state)
        action = epsilon_greedy(q, noise["explore"], noise["choice"], self.epsilon.value, mask)
        return AgentStep({self.name: action}, {}, state)

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return the largest Q of allowed choices."""
        return max_q_value(self._q_of_step(step.observation, state, step.first)[0], self._mask(step.observation))

    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Refuse: the policy is greedy."""
        raise UserError(
            "PQN has no distribution of actions, since it takes the one with the largest Q; policy.act returns that "
            "action and policy.value its Q."
        )

    @torch.inference_mode()
    def final_value(self, final: Tensors, state: HiddenState) -> Tensor | None:
        """Return max Q of episodes' last observations for recurrent networks, before the reset clears the state."""
        return self._value_of(final, state) if self.recurrent else None

    def _value_of(self, observation: Tensors, state: HiddenState) -> Tensor:
        """Return max Q of observations ``[B, …]`` that do not begin an episode."""
        rows = len(next(iter(observation.values())))
        first = torch.zeros(rows, dtype=torch.bool, device=self.device)
        return max_q_value(self._q_of_step(observation, state, first)[0], self._mask(observation))

    def _q_of_step(
        self, observation: Tensors, state: HiddenState, first: Tensor, network: nn.Module | None = None
    ) -> tuple[Tensor, HiddenState]:
        step = {name: x.unsqueeze(0) for name, x in observation.items()}
        q, state = self.q(step, state, first.unsqueeze(0), network)
        return q.squeeze(0), state

    def _mask(self, observation: Tensors) -> Tensor | None:
        return None if self.mask is None else observation[self.mask]

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Batch:
        """Add ``target``, the Q(λ) return of each transition by the current network."""
        q, _ = self.q(batch.observation, batch.state, batch.first)  # [T+1, B, A]
        final = batch.experience.get("final_value")
        if batch.final:
            rows = {name: x.flatten(0, 1) for name, x in batch.final.items()}
            final = self._value_of(rows, HiddenState()).view_as(batch.reward)
        value_t = batch.next_value(max_q_value(q, self._mask(batch.observation)), final)
        lambda_ = self.config.trace_lambda
        target = lambda_returns(batch.reward, batch.discount, batch.continues, value_t, lambda_)
        return replace(batch, experience=batch.experience | {"target": target})

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Run epochs of minibatches, each with a new permutation, on targets that are computed once."""
        config, prepared = self.config, self.prepare(batch)
        learned: list[Tensors] = []
        for _ in range(config.epochs):
            parts = list(prepared.minibatches(config.minibatches, self.by, self.generator))
            share = shares_of_each([part.real.to(part.reward.dtype) for part in parts], updater.sum)
            for part, of_rows in zip(parts, share, strict=True):
                learned.append(updater.step(self.compute_loss, replace(part, share=of_rows), "all"))
        if self.parameter_noise is not None:
            self._adapt(self.parameter_noise, batch.without_last_observation(), updater)
        if self.normalizer is not None:
            seen = self.preprocess({name: x[:-1] for name, x in batch.observation.items()})
            self.normalizer.update(seen, batch.real, updater.sum)
        return Learned({name: torch.stack([x[name] for x in learned]).mean() for name in learned[0]})

    def _adapt(self, noise: ParameterNoise, batch: Batch, updater: Updater) -> None:
        """Adapt the scale of parameter noise to the KL of the softmax policies of Q and of perturbed Q."""
        given, mask = (batch.observation, batch.state, batch.first), self._mask(batch.observation)

        def distance(perturbed: nn.Module) -> Tensor:
            both = [self.q(*given, network)[0] for network in (None, perturbed)]
            q, other = (x if mask is None else mask_logits(x, mask) for x in both)
            return softmax_kl(q, other, batch.real, updater.sum)

        noise.target = epsilon_kl(self.config.parameter_noise, self.choices)
        noise.adapt(noise.measure(self.generator, distance))

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return half the squared error of Q to the targets of a prepared batch with shares."""
        q, _ = self.q(batch.observation, batch.state, batch.first)
        taken = gather_action(q, batch.action[self.name])
        loss = 0.5 * value_loss(taken, batch.experience["target"])
        return {"value": share_sum(loss, batch.share)}, {"q": share_sum(taken.detach(), batch.share)}

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Also set ε, and return it."""
        self.progress = progress
        sigma = {} if self.parameter_noise is None else {"parameter_noise_sigma": float(self.parameter_noise.sigma)}
        return {"epsilon": self.epsilon.update(progress), **sigma, **super().schedule(progress)}

    def get_extra_state(self) -> dict[str, float]:
        """Save the progress, for ε."""
        return {"progress": self.progress}

    def set_extra_state(self, state: Any) -> None:
        """Restore it."""
        self.schedule(state["progress"])
