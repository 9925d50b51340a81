"""DQN: deep Q-learning with a replay buffer (Mnih et al. 2015); extensions are settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import not_
from typing import Any, Literal

import torch
from torch import Tensor

from ludus.agents.off_policy import CURRENT, MEAN, NEXT, OffPolicy, intermediate_observations, with_experience
from ludus.agents.parameter_noise import adapt_to_distance
from ludus.agents.replay_actor_critic import discounted_bonus
from ludus.core.batch import Batch, Learned
from ludus.core.config import UnusedSetting
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs, mask_name
from ludus.core.step import AgentStep, EnvStep, Episode
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import OptimizerName, Updater
from ludus.experience.config import ReplayConfig
from ludus.exploration.epsilon import Epsilon, epsilon_greedy, epsilon_greedy_numpy
from ludus.exploration.parameter_noise import (
    SEED,
    SIGMA,
    ParameterNoise,
    draw_seeds,
    epsilon_kl,
    generator_from,
    softmax_kl,
)
from ludus.networks.build import network_spec
from ludus.networks.module_checks import uses_methods_of
from ludus.networks.noisy import resample_noise, without_noise
from ludus.networks.numpy_actor import NumpyMLP, is_plain_mlp, is_plain_vector
from ludus.networks.value_heads import (
    ACTING_QUANTILES,
    ExpectedValue,
    ValueHead,
    make_value_head,
    number_of_choices,
)
from ludus.ops.distributions import mask_logits
from ludus.ops.offline import conservative_loss
from ludus.ops.policy_gradient import share_sum
from ludus.ops.q_learning import (
    double_q_value,
    greedy,
    max_q_value,
    mixed_priority,
    munchausen_reward,
    munchausen_value,
    n_step_targets,
    policy_entropy,
    soft_log_policy,
    soft_n_step_targets,
    td_target,
    unrescale,
)

TAUS = ("taus", "selection_taus", "target_taus")  # quantile levels of IQN
LOG_POLICY_FLOOR, RESCALING = -1.0, 1e-3  # l₀ of Munchausen and ε of R2D2, as published


@dataclass(frozen=True)
class DQNConfig(ReplayConfig):
    """Settings of DQN; Double DQN, Rainbow, R2D2 and others are combinations of them."""

    UNUSED = (
        *ReplayConfig.UNUSED,
        UnusedSetting("priority_mix", "prioritized", not_, "agent.prioritized is off"),
        UnusedSetting("priority_mix", "sequence", not_, "agent.sequence is 0, and single transitions are drawn"),
        UnusedSetting("atoms", "values", "expected".__eq__, "agent.values is expected, which has no atoms"),
        UnusedSetting("v_min v_max", "values", "categorical".__ne__, "agent.values is {}, which has no bounds"),
        UnusedSetting("temperature", "munchausen", not_, "agent.munchausen is 0"),
        UnusedSetting(
            "epsilon_schedule epsilon_start epsilon_end epsilon_share epsilon_ladder",
            "noisy",
            bool,
            "agent.noisy is on, and noisy layers explore in place of ε",
        ),
        UnusedSetting(
            "epsilon_end epsilon_share", "epsilon_schedule", "constant".__eq__, "agent.epsilon_schedule is constant"
        ),
    )
    SCHEDULABLE = (
        *ReplayConfig.SCHEDULABLE,
        *("epsilon_start", "parameter_noise", "tau", "munchausen", "temperature", "priority_mix"),
    )
    UNUSED_OFFLINE = (
        *ReplayConfig.UNUSED_OFFLINE,
        *(f"epsilon_{name}" for name in ("schedule", "start", "end", "share", "ladder")),
        "parameter_noise",
    )
    batch_size: int = 128  # transitions (or sequences) per update
    updates_per_step: float = 0.25  # gradient updates per environment step: more is slower and more sample-efficient
    learning_rate: float = 5e-4  # raise for speed, lower when the return collapses
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    target_every: int = 100  # updates between two updates of the target network
    tau: float = 1.0  # Polyak coefficient of that update; 1: a copy
    double: bool = False  # Double DQN: select next actions online, evaluate them by the target network
    dueling: bool = False  # separate streams for state value and advantages
    noisy: bool = False  # noisy layers (NoisyNet) explore instead of ε
    # expected: the mean of the return; or its distribution: categorical (C51), quantile (QR-DQN), implicit (IQN)
    values: Literal["expected", "categorical", "quantile", "implicit"] = "expected"
    atoms: int = 51  # categorical: atoms; quantile: quantiles; implicit: quantiles per update
    v_min: float = -10.0  # categorical: smallest return that the atoms represent
    v_max: float = 10.0  # categorical: largest return that the atoms represent
    munchausen: float = 0.0  # weight of the log-policy that is added to the reward, such as 0.9; 0: off
    temperature: float = 0.03  # of the Munchausen policy
    rescaled: bool = False  # learn values on the invertible square-root scale of R2D2
    # weight of the conservative loss (CQL), which lowers Q of actions that the batch lacks, for recorded data: higher
    # stays nearer to the recorded actions; 0: off
    conservative_coef: float = 0.0
    priority_mix: float = 0.9  # sequences: weight of the largest TD error in the priority; the rest is for the mean
    epsilon_schedule: Literal["linear", "exponential", "constant"] = "linear"  # of ε over the run
    epsilon_start: float = 1.0  # initial ε; with the constant schedule, that of the whole run
    epsilon_end: float = 0.05  # final ε: raise to keep exploring
    epsilon_share: float = 0.1  # share of the run after which epsilon_end is reached
    epsilon_ladder: float = 0.0  # exponent of a ladder of ε over environments (Ape-X), such as 7; 0: equal ε
    # noise on the network's parameters besides ε, adapted so that actions differ as if this were ε, such as 0.1; 0: off
    parameter_noise: float = 0.0
    max_grad_norm: float = 10.0  # gradients are scaled down to this norm; 0: never
    optimizer: OptimizerName = "adam"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    weight_decay: float = 0.0  # shrinks weights at each step: adamw apart from the gradient, others as a penalty
    optimizer_eps: float = 1e-8  # raise for smoother steps

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(
            self,
            fraction=("munchausen", "priority_mix", "parameter_noise"),
            positive=("atoms", "target_every", "temperature", "tau"),
            nonnegative=("weight_decay", "conservative_coef"),
            finite=("v_min", "v_max"),
        )
        if self.values == "categorical" and self.v_min >= self.v_max:
            raise UserError(f"agent.v_min is {self.v_min:g}, but must be less than agent.v_max, {self.v_max:g}.")
        for name in ("munchausen", "rescaled", "sequence"):
            if getattr(self, name) and self.values != "expected":
                raise UserError(f"agent.{name} works on expected values; set agent.values to expected, or turn it off.")
        if self.noisy and self.parameter_noise:
            raise UserError("agent.noisy and agent.parameter_noise both perturb the parameters; turn one of them off.")
        for name in ("double", "rescaled"):
            if self.munchausen and getattr(self, name):
                raise UserError(f"agent.munchausen and agent.{name} do not go together; turn one of them off.")

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also the ladder of ε with a single environment."""
        yield from super().unused(observation, action, rows)
        if rows == 1:
            yield "epsilon_ladder", "env.num is 1, and a ladder is over environments"


class DQN(OffPolicy):
    """Q of every choice, learned from a replay buffer."""

    Config: type[Any] = DQNConfig
    network_names = ("q",)
    acting = with_target = ("q",)

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        head = self.make_head(action, config)
        super().__init__(observation, action, config, networks, {"head": head})
        self.head = head
        self._of_target: list[Any] = [self.target.networks["head"]]  # in a list: it is a part of the target alone
        (self.name,) = action
        self.mask = mask_name(self.name, action) if mask_name(self.name, action) in observation else None
        settings = (config.epsilon_start, config.epsilon_end, config.epsilon_share, config.epsilon_ladder)
        self.epsilon = Epsilon("constant", 0.0) if config.noisy else Epsilon(config.epsilon_schedule, *settings)
        self.munchausen, self.conservative = bool(config.munchausen), bool(config.conservative_coef)
        self.soft = self.munchausen
        if config.parameter_noise:
            self.parameter_noise = ParameterNoise(networks["q"], SIGMA)
        self._numpy: NumpyMLP | None = None

    @staticmethod
    def make_head(action: Specs, c: Any) -> ValueHead:
        """Make the head that turns network outputs into Q of choices."""
        return make_value_head(c.values, number_of_choices(action), c.dueling, c.atoms, c.v_min, c.v_max, c.noisy)

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for one network that outputs Q of all choices."""
        head = cls.make_head(action, config)
        return {"q": network_spec(observation, head.outputs)._replace(streams=head.streams, noisy=config.noisy)}

    def use_numpy(self) -> bool:
        """Act in numpy where the network is a plain MLP with expected values and nothing is overridden."""
        plain = is_plain_vector(self.preprocess) and is_plain_mlp(self.networks["q"]) and self.mask is None
        plain = (
            plain and type(self.head) is ExpectedValue and "q" in self.head.outputs and type(self.epsilon) is Epsilon
        )
        plain = plain and uses_methods_of(self, DQN, ("act", "_act", "inputs", "run", "run_acting"))
        plain = plain and self.parameter_noise is None
        skipped: Any = (self.networks["q"], ["q"], self.preprocess.modules(), self.normalizer)
        self._numpy = NumpyMLP(*skipped) if plain else None
        return plain

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Draw the numbers of ε-greedy choices, and quantile levels for IQN."""

        def draw(steps: int, generator: torch.Generator) -> Tensors:
            drawn = self.epsilon.draw(steps, rows.total, self.head.actions, generator)
            if self.config.noisy:  # a seed, so that acting is a pure function
                drawn["noisy"] = torch.randint(2**31, (steps, rows.total), generator=generator, device=generator.device)
            if self.parameter_noise is not None:
                drawn[SEED] = draw_seeds(steps, rows.total, generator)
            if self.head.needs_taus:
                drawn["taus"] = torch.rand(
                    steps, rows.total, ACTING_QUANTILES, generator=generator, device=generator.device
                )
            return drawn

        return Noise(draw, generator, rows)

    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Return the greedy choice; with ``noise``, ε-greedy."""
        if self._numpy is None or not self._numpy.usable():
            return self._act(step, state, noise)
        (q,) = self._numpy(next(iter(step.observation.values())).numpy())
        drawn = None if noise is None else (noise["explore"].numpy(), noise["choice"].numpy())
        action = q.argmax(-1) if drawn is None else epsilon_greedy_numpy(q, *drawn, self.epsilon.value)
        return AgentStep({self.name: torch.from_numpy(action)}, {}, state)

    @torch.inference_mode()
    def _act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> AgentStep:
        ready = self.inputs({name: x.unsqueeze(0) for name, x in step.observation.items()})
        if noise is not None and "noisy" in noise:
            resample_noise(self, generator_from(noise["noisy"]))
        with without_noise(self) if noise is None else nullcontext():
            outputs, state = self.run_acting(ready, state, step.first.unsqueeze(0), noise)
            outputs = {name: x.squeeze(0) for name, x in outputs.items()}
            q = self.head.q(outputs, (noise or {}).get("taus"))
        mask = None if self.mask is None else step.observation[self.mask]
        if noise is None:
            return AgentStep({self.name: greedy(q, mask)}, {}, state)
        action = epsilon_greedy(q, noise["explore"], noise["choice"], self.epsilon.value, mask)
        return AgentStep({self.name: action}, {}, state)

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return the largest Q of allowed choices."""
        ready = self.inputs({name: x.unsqueeze(0) for name, x in step.observation.items()})
        with without_noise(self):
            outputs, _ = self.run("q", ready, state, step.first.unsqueeze(0))
            q = self.head.q({name: x.squeeze(0) for name, x in outputs.items()})
        value = max_q_value(q, None if self.mask is None else step.observation[self.mask])
        return self.unscale_value(unrescale(value, RESCALING) if self.config.rescaled else value)

    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Refuse: the policy is greedy."""
        raise UserError(
            "DQN has no distribution of actions, since it takes the one with the largest Q; policy.act returns that "
            "action and policy.value its Q."
        )

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Scale rewards, apply the burn-in, draw quantile levels and set shares."""
        batch = self.with_scaled_reward(batch)
        if self.config.sequence:
            state = self.burn_in_state(batch, "q")
            state |= self.burn_in_state(batch, "q", target=True).with_prefix("target")
            batch = replace(batch.skip_steps(self.config.burn_in), state=state)
        if self.head.needs_taus:
            shape = (3, *batch.reward.shape, self.config.atoms)
            batch = with_experience(batch, **dict(zip(TAUS, self.draw(batch, *shape, uniform=True), strict=True)))
        return self.with_shares(batch, sum_over_ranks)

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Take one step, and update the target network every ``target_every`` updates."""
        if self.config.noisy:
            resample_noise(self, self.generator)
        batch = self.prepare(batch, updater.sum)
        metrics = updater.step(self.compute_loss, batch, "all")
        self.finish_update(self.config.target_every)
        if self.parameter_noise is not None:
            adapt_to_distance(self, batch, updater)
        return Learned(metrics, metrics.pop("priority", None))

    def perturbed_distance(
        self, batch: Batch, outputs: Tensors, perturbed: Tensors, sum_over_ranks: SumOverRanks = single_rank
    ) -> Tensor:
        """Return the KL of the softmax policies of Q and of perturbed Q, over allowed choices."""
        mask = None if self.mask is None else batch.observation[self.mask][CURRENT]
        both = [self.head.q(given, batch.experience.get("taus")) for given in (outputs, perturbed)]
        q, other = (x if mask is None else mask_logits(x, mask) for x in both)
        return softmax_kl(q, other, batch.real, sum_over_ranks)

    @torch.no_grad()
    def td_errors(self, batch: Batch) -> Tensor:
        return self.compute_loss(self.prepare(batch))[1]["priority"]

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the Huber loss of TD errors, or the distributional loss, weighted by importance; and CQL's, if on."""
        config, head, action = self.config, self.head, batch.action[self.name]
        ready = self.inputs(batch.observation)
        taus = [batch.experience.get(name) for name in TAUS]
        later: Tensors = {}
        if config.sequence:
            outputs, _ = self.run("q", ready, batch.state, batch.first)
            now, later = ({name: x[part] for name, x in outputs.items()} for part in (CURRENT, NEXT))
        else:
            now, _ = self.run("q", {name: x[CURRENT] for name, x in ready.items()}, batch.state, batch.first[CURRENT])
        with torch.no_grad():
            target = self._target(batch, ready, later, taus)
        prediction = head.evaluate(now, action, taus[0])
        loss = head.loss(prediction, target, taus[0])
        metrics = {"q": share_sum(head.mean(prediction.detach()), batch.experience[MEAN])}
        if config.prioritized:
            priority = head.priority(prediction.detach(), target, loss.detach())
            metrics["priority"] = (
                mixed_priority(priority, batch.real, config.priority_mix) if config.sequence else priority[0]
            )
        losses = {"value": share_sum(loss, batch.share)}
        if self.conservative:
            allowed = None if self.mask is None else batch.observation[self.mask][CURRENT]
            penalty = conservative_loss(head.q(now, taus[0]), action, allowed)
            losses["conservative"] = share_sum(penalty, batch.share)
        return losses, metrics

    def _target(self, batch: Batch, ready: Tensors, later: Tensors, taus: list[Tensor | None]) -> Tensor:
        """Return the target of predictions; ``later`` are the online outputs of next states, if they are known."""
        config, state, target_now = self.config, batch.state, dict[str, Tensor]()
        if config.sequence:
            target, _ = self.run("q", ready, state.select("target"), batch.first, target=True)
            target_now, target_next = ({name: x[part] for name, x in target.items()} for part in (CURRENT, NEXT))
        else:
            following, first = {name: x[NEXT] for name, x in ready.items()}, batch.first[NEXT]
            target_next, _ = self.run("q", following, state, first, target=True)
            if config.double:
                later, _ = self.run("q", following, state, first)
            if self.munchausen:
                current = {name: x[CURRENT] for name, x in ready.items()}
                target_now, _ = self.run("q", current, state, batch.first[CURRENT], target=True)
        selecting = later if config.double else target_next
        mask = None if self.mask is None else batch.observation[self.mask][NEXT]
        if config.values == "expected":
            return self._expected_target(batch, selecting, target_now, target_next, mask)
        selector = self.head if config.double else self._of_target[0]  # of the network that selects
        next_action = greedy(selector.q(selecting, taus[1]), mask)
        found: Tensor = self._of_target[0].target(target_next, next_action, batch.reward, batch.discount, taus[2])
        return found

    def _expected_target(
        self, batch: Batch, selecting: Tensors, target_now: Tensors, target_next: Tensors, mask: Any
    ) -> Tensor:
        """Return the target of expected values."""
        config, reward, q_t = self.config, batch.reward, self._of_target[0].q(target_next)
        if self.munchausen:
            now = None if self.mask is None else batch.observation[self.mask][:-1]
            settings = (config.temperature, config.munchausen, LOG_POLICY_FLOOR, now)
            reward = reward + munchausen_reward(self._of_target[0].q(target_now), batch.action[self.name], *settings)
            value_t = munchausen_value(q_t, config.temperature, mask)
            if config.n_step > 1 and config.sequence:
                bonus = config.temperature * policy_entropy(soft_log_policy(q_t, config.temperature, mask))
                return soft_n_step_targets(reward, batch.discount, batch.continues, value_t, bonus, config.n_step)
            if config.n_step > 1:
                reward = reward + discounted_bonus(batch, self._intermediate_bonus(batch))
        else:
            value_t = double_q_value(q_t, self.head.q(selecting), mask) if config.double else max_q_value(q_t, mask)
        if config.sequence or config.rescaled:
            n, eps = (config.n_step if config.sequence else 1), (RESCALING if config.rescaled else None)
            return n_step_targets(reward, batch.discount, batch.continues, value_t, n, eps)
        return td_target(reward, batch.discount, value_t)

    def _intermediate_bonus(self, batch: Batch) -> Tensor:
        """Return the Munchausen reward plus entropy bonus at intermediate states of n-step returns, ``[n − 1, B]``."""
        config, (observation, first) = self.config, intermediate_observations(batch)
        outputs, _ = self.run("q", self.inputs(observation), batch.state, first, target=True)
        q: Tensor = self._of_target[0].q(outputs)
        mask = None if self.mask is None else observation[self.mask]
        settings = (config.temperature, config.munchausen, LOG_POLICY_FLOOR, mask)
        entropy = policy_entropy(soft_log_policy(q, config.temperature, mask))
        bonus: Tensor = config.temperature * entropy
        return bonus + munchausen_reward(q, batch.window[f"action/{self.name}"], *settings)

    def episode_warning(self, episodes: list[Episode]) -> str:
        # scaled rewards have no known range
        return "" if self.config.normalize_reward else self.head.episode_warning(episodes, self.config.gamma)

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Also set ε, and return it."""
        values = {"epsilon": self.epsilon.update(progress), **super().schedule(progress)}
        if self.parameter_noise is not None:
            self.parameter_noise.target = epsilon_kl(self.config.parameter_noise, self.head.actions)
            values["parameter_noise_sigma"] = float(self.parameter_noise.sigma)
        return values
