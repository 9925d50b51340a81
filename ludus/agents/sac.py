"""SAC: soft actor-critic with a learned temperature (Haarnoja et al. 2018b), for continuous actions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from operator import not_
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ludus.agents.off_policy import CURRENT, MEAN, NEXT, OffPolicy, intermediate_observations, with_experience
from ludus.agents.parameter_noise import adapt_to_distance
from ludus.agents.replay_actor_critic import (
    BELOW_ONE,
    FlatActions,
    actor_and_critics,
    apply_burn_in,
    at_time,
    noise_chunk,
    numpy_actor,
    priority_metric,
    random_actions,
    targets,
)
from ludus.core.batch import Batch, Learned
from ludus.core.config import UnusedSetting
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec, Shapes
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import Group, Updater
from ludus.experience.config import WIDE_MLP, ReplayConfig
from ludus.exploration.parameter_noise import SEED, SIGMA, ParameterNoise, draw_seeds, rms_distance
from ludus.networks.critic import ACTION
from ludus.networks.module_checks import uses_methods_of
from ludus.networks.numpy_actor import NumpyMLP
from ludus.ops.distributional import quantile_critic_loss, quantile_midpoints, truncated_quantiles
from ludus.ops.distributions import gaussian_sample, tanh_gaussian_draw
from ludus.ops.offline import sampled_logsumexp
from ludus.ops.policy_gradient import share_sum
from ludus.ops.q_learning import sac_actor_loss, sac_critic_loss, sac_value, temperature_loss

EXCESS_ENTROPY = "excess_entropy"  # metric of actor losses: the policy's entropy minus the target entropy
LOG_STD = (-20.0, 2.0)  # bounds of the policy's log standard deviation


@dataclass(frozen=True)
class SoftActorCriticConfig(ReplayConfig):
    """Settings of SAC and discrete SAC."""

    UNUSED = (
        *ReplayConfig.UNUSED,
        UnusedSetting(
            "alpha_learning_rate target_entropy", "learn_alpha", not_, "agent.learn_alpha is off, so alpha stays"
        ),
    )
    SCHEDULABLE = (*ReplayConfig.SCHEDULABLE, "tau", "alpha", "target_entropy", "parameter_noise")
    UNUSED_OFFLINE = (*ReplayConfig.UNUSED_OFFLINE, "parameter_noise")
    learning_rate: float = 3e-4  # raise for speed, lower when the return collapses
    actor_learning_rate: float = 0.0  # of the actor; 0: learning_rate
    critic_learning_rate: float = 0.0  # of the critics; 0: learning_rate
    alpha_learning_rate: float = 0.0  # of the temperature; 0: learning_rate
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    tau: float = 0.005  # Polyak coefficient of the target networks: higher is faster and less stable
    critics: int = 2  # the target takes their minimum; 2 against overestimation
    policy_delay: int = 1  # updates of the critics per update of the actor and the temperature
    alpha: float = 1.0  # temperature: weight of the entropy bonus (initial value, if learned); raise to explore more
    learn_alpha: bool = True  # learn the temperature to keep the entropy near target_entropy
    # none: minus the number of action elements; lower for a more deterministic policy
    target_entropy: float | None = None
    # noise on the actor's parameters besides sampling, adapted so that mean actions differ by this, such as 0.1
    # (discrete: so that the policy differs as an ε-greedy one with this ε); 0: off
    parameter_noise: float = 0.0
    max_grad_norm: float = 0.0  # gradients are scaled down to this norm; 0: never
    optimizer_eps: float = 1e-8  # raise for smoother steps

    def validate(self) -> None:
        super().validate()
        rates = ("actor_learning_rate", "critic_learning_rate", "alpha_learning_rate")
        check_ranges(
            self, positive=("tau", "critics", "policy_delay", "alpha"), nonnegative=(*rates, "parameter_noise")
        )
        if self.target_entropy is not None:
            check_ranges(self, finite=("target_entropy",))
        if self.learn_alpha and "alpha" in self.schedules():
            raise UserError(
                f"agent.alpha is {self.alpha}, but agent.learn_alpha is on, so it is only the initial value; give a "
                "number, or turn agent.learn_alpha off."
            )


class SoftActorCritic(OffPolicy):
    """A policy that maximizes reward and entropy, with critics learned from a replay buffer."""

    network_names = ("actor", "critic")
    soft = True  # values include the policy's entropy
    acting = ("actor",)
    with_target: tuple[str, ...] = ("critic",)
    log_alpha: Tensor
    policy_metrics: Tensor

    def __init__(self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network]) -> None:
        super().__init__(observation, action, config, networks)
        if config.parameter_noise:
            self.parameter_noise = ParameterNoise(networks["actor"], SIGMA)
        log_alpha = torch.tensor(math.log(config.alpha))
        if config.learn_alpha:
            self.log_alpha = nn.Parameter(log_alpha)
        else:
            self.register_buffer("log_alpha", log_alpha)
        self._policy_names = ["loss/actor", "entropy", "alpha", *(["loss/alpha"] if config.learn_alpha else [])]
        # of the last step of the policy, logged at updates that do not step it as well
        self.register_buffer("policy_metrics", torch.zeros(len(self._policy_names)))
        self.policy_metrics[2] = config.alpha

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Also set the temperature, if it is a schedule, and the target of parameter noise."""
        values = dict(super().schedule(progress))
        if self.parameter_noise is not None:
            self.parameter_noise.target = self.noise_target
            values["parameter_noise_sigma"] = float(self.parameter_noise.sigma)
        if "alpha" in values:
            self.log_alpha.fill_(math.log(values["alpha"]))
        return values

    @abstractmethod
    def taken_q(self, batch: Batch, inputs: Tensors, first: Tensor) -> Tensor:
        """Return Q of the batch's actions by each critic, ``[T, B, critics]``."""

    @abstractmethod
    def target_value(self, batch: Batch, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Return the value of the next states with its entropy bonus, and that bonus alone, ``[T, B]`` each."""

    @abstractmethod
    def intermediate_bonus(self, batch: Batch) -> Tensor:
        """Return the entropy bonus at the intermediate states of n-step returns, ``[n − 1, B]``."""

    @abstractmethod
    def actor_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the loss of the policy; its metrics are the entropy and ``EXCESS_ENTROPY``."""

    @property
    def noise_target(self) -> float:
        """The ``perturbed_distance`` that parameter noise is adapted to."""
        return float(self.config.parameter_noise)

    def parameter_groups(self) -> dict[str, Group]:
        """Step critics, actor and temperature separately."""
        config = self.config
        groups = {
            "critic": self.make_group(self.networks["critic"].parameters(), config.critic_learning_rate),
            "actor": self.make_group(self.networks["actor"].parameters(), config.actor_learning_rate),
        }
        if config.learn_alpha:
            groups["alpha"] = self.make_group([self.log_alpha], config.alpha_learning_rate)  # type: ignore[list-item]
        return groups

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Scale rewards, apply the burn-in and set shares."""
        return self.with_shares(apply_burn_in(self, self.with_scaled_reward(batch)), sum_over_ranks)

    @torch.no_grad()
    def td_errors(self, batch: Batch) -> Tensor:
        return self.critic_loss(self.prepare(batch))[1]["priority"]

    def critic_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return half the squared TD errors of all critics."""
        inputs = self.inputs(batch.observation)
        target = self.soft_targets(batch, *self.target_value(batch, inputs))
        q = self.taken_q(batch, *at_time(inputs, batch.first, CURRENT))
        return self.critic_terms(batch, q, target)

    def soft_targets(self, batch: Batch, value: Tensor, bonus: Tensor) -> Tensor:
        """Return the targets of the critics, given what ``target_value`` returns."""
        config = self.config
        if config.n_step == 1:
            return targets(batch, value, config)
        # n-step returns include the entropy bonus of every intermediate state
        return targets(batch, value, config, bonus if config.sequence else self.intermediate_bonus(batch))

    def critic_terms(self, batch: Batch, q: Tensor, target: Tensor) -> tuple[Tensors, Tensors]:
        """Return the loss of the critics, and the mean Q and new priorities as metrics."""
        loss = share_sum(sac_critic_loss(q, target), batch.share)
        metrics = {"q": share_sum(q.detach().mean(-1), batch.experience[MEAN])}
        return {"critic": loss}, metrics | priority_metric(q - target.unsqueeze(-1), batch, self.config)

    def alpha_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the temperature loss of a batch with the excess entropy of ``actor_loss``.

        The temperature rises while the entropy is below its target.
        """
        return {"alpha": temperature_loss(self.log_alpha, -batch.experience[EXCESS_ENTROPY], 0.0)}, {}

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return all losses of a prepared batch together; ``learn`` steps each separately."""
        losses, metrics = self.critic_loss(batch)
        more, found = self.actor_loss(batch)
        if self.config.learn_alpha:
            more |= self.alpha_loss(with_experience(batch, **found))[0]
        return losses | more, metrics | found

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Step the critics, and every ``policy_delay``-th time actor and temperature; then the target networks."""
        batch = self.prepare(batch, updater.sum)
        metrics = updater.step(self.critic_loss, batch, "critic")
        priority = metrics.pop("priority", None)
        if (self.updates + 1) % self.config.policy_delay == 0:
            alpha = self.log_alpha.detach().exp()  # before the update, as in both losses
            found = updater.step(self.actor_loss, batch, "actor")
            stepped = [found["loss/actor"], found["entropy"], alpha]
            if self.config.learn_alpha:
                excess = found[EXCESS_ENTROPY] / updater.ranks  # losses are summed over ranks
                more = with_experience(batch, **{EXCESS_ENTROPY: excess})
                stepped.append(updater.step(self.alpha_loss, more, "alpha")["loss/alpha"])
            self.policy_metrics.copy_(torch.stack(stepped))
        self.finish_update()
        if self.parameter_noise is not None:
            adapt_to_distance(self, batch, updater)
        last = zip(self._policy_names, self.policy_metrics.clone().unbind(), strict=True)
        return Learned(metrics | dict(last), priority)


@dataclass(frozen=True)
class SACConfig(SoftActorCriticConfig):
    """Settings of SAC; TQC, DroQ, CrossQ and CQL are combinations of them."""

    NETWORK_DEFAULTS = WIDE_MLP
    UNUSED = (
        *SoftActorCriticConfig.UNUSED,
        UnusedSetting("dropped_quantiles", "quantiles", not_, "agent.quantiles is 0, so critics give expected values"),
        UnusedSetting("pessimistic_actor", "critics", (1).__eq__, "agent.critics is 1"),
        UnusedSetting("tau", "target_networks", not_, "agent.target_networks is off"),
        UnusedSetting("conservative_samples", "conservative_coef", not_, "agent.conservative_coef is 0"),
    )
    quantiles: int = 0  # quantiles of the return that each critic gives, such as 25; 0: its expected value
    # largest quantiles per critic that targets leave out, against overestimation: raise when Q is far above the returns
    dropped_quantiles: int = 2
    pessimistic_actor: bool = True  # the policy maximizes the minimum over critics; off: their mean
    target_networks: bool = True  # targets by averaged critics; off: by the critics themselves, which need batch norms
    adam_beta1: float = 0.9  # decay of Adam's mean of gradients: lower follows new gradients sooner
    # weight of the conservative loss (CQL), which lowers Q of actions that the batch lacks, for recorded data: higher
    # stays nearer to the recorded actions; 0: off
    conservative_coef: float = 0.0
    conservative_samples: int = 10  # random actions, and as many of the policy, per state of that loss; more are slower

    def validate(self) -> None:
        super().validate()
        check_ranges(
            self,
            fraction=("adam_beta1",),
            positive=("conservative_samples",),
            nonnegative=("quantiles", "dropped_quantiles", "conservative_coef"),
        )
        if self.conservative_coef and (self.sequence or not self.target_networks):
            other = "agent.sequence to 0" if self.sequence else "agent.target_networks on"
            raise UserError(
                f"agent.conservative_coef is {self.conservative_coef:g}, which works on single transitions with target "
                f"networks; set {other}, or agent.conservative_coef to 0."
            )
        if self.quantiles and self.dropped_quantiles >= self.quantiles:
            raise UserError(
                f"agent.dropped_quantiles is {self.dropped_quantiles}, but must be less than agent.quantiles, "
                f"{self.quantiles}."
            )


class SAC(SoftActorCritic):
    """A tanh-squashed Gaussian policy that maximizes reward and entropy, with critics learned from a replay buffer.

    Actions are stored as u before tanh; critics get tanh(u).
    """

    Config: type[Any] = SACConfig
    taus: Tensor

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        if not config.target_networks:
            self.with_target = ()
            if any(network.recurrent for network in networks.values()):
                raise UserError(
                    "agent.target_networks is off, which needs feed-forward networks, but one is recurrent; turn it on."
                )
        super().__init__(observation, action, config, networks)
        self.flat = FlatActions(config, action)
        self.conservative = bool(config.conservative_coef)
        self._numpy: NumpyMLP | None = None
        self.register_buffer("taus", quantile_midpoints(max(1, config.quantiles)), persistent=False)

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for an actor and Q(s, a) critics."""
        networks = actor_and_critics(observation, action, config, outputs=2)
        values: Shapes = {"value": (max(1, config.quantiles),)}
        return networks | {"critic": networks["critic"]._replace(outputs=values)}

    @property
    def target_entropy(self) -> float:
        """The entropy that the temperature is learned to keep."""
        target: float | None = self.config.target_entropy
        return -float(self.flat.size) if target is None else target

    @property
    def action_transform(self) -> Mapping[str, str]:
        """Squash u by tanh and rescale it to the Box."""
        return dict.fromkeys(self.action, "tanh")

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Draw normal numbers for sampling, and uniform actions for the warm-up."""
        size, batch = self.flat.size, rows.total

        def draw(steps: int, g: torch.Generator) -> Tensors:
            normal = torch.randn(steps, batch, size, generator=g, device=g.device)
            random = random_actions(steps, batch, size, g).clamp_(-BELOW_ONE, BELOW_ONE).atanh_()
            seeds = {} if self.parameter_noise is None else {SEED: draw_seeds(steps, batch, g)}
            return {"normal": normal, "random": random, **seeds}

        return Noise(draw, generator, rows, noise_chunk(2 * batch * size))

    def use_numpy(self) -> bool:
        """Act in numpy where the actor is a plain MLP on the CPU."""
        ours = uses_methods_of(self, SAC, ("act", "_act", "inputs", "policy", "run", "run_acting"))
        self._numpy = numpy_actor(self) if ours and self.parameter_noise is None else None
        return self._numpy is not None

    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Return the mean action; with ``noise``, a uniform one until the first update and a sample later."""
        if self._numpy is None or not self._numpy.usable():
            u, state = self._act(step, state, noise)
        else:
            mean, log_std = np.split(self._numpy(next(iter(step.observation.values())).numpy())[0], 2, axis=1)
            if noise is not None:
                mean = mean + np.exp(np.clip(log_std, *LOG_STD)) * noise["normal"].numpy()
            u = torch.from_numpy(mean)
        u = noise["random"] if noise is not None and self.updates == 0 else u
        return AgentStep(self.flat.split(u), {}, state)

    @torch.inference_mode()
    def _act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> tuple[Tensor, HiddenState]:
        outputs, new = self.run_acting(self.step_inputs(step), state, step.first.unsqueeze(0), noise)
        mean, log_std = gaussian(outputs)
        u = mean if noise is None else gaussian_sample(mean, log_std, noise["normal"])
        return u.squeeze(0), HiddenState(state | new) if new else state

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return the minimum over critics of Q at the policy's mean action."""
        self.refuse_recurrent_value()
        inputs, first = self.step_inputs(step), step.first[None]
        q = self.q(inputs, self.policy(inputs, state, first)[0].tanh(), state, first)
        return self.unscale_value(q.amin(-1).squeeze(0))

    @torch.inference_mode()
    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Return mean and standard deviation before tanh."""
        mean, log_std, _ = self.policy(self.step_inputs(step), state, step.first[None])
        parts = {"mean_before_tanh": mean.squeeze(0), "std_before_tanh": log_std.exp().squeeze(0)}
        split = {key: self.flat.split(x) for key, x in parts.items()}
        return {name: {key: x[name] for key, x in split.items()} for name in self.action}

    def policy(self, inputs: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensor, Tensor, HiddenState]:
        """Return mean and log standard deviation ``[T, B, K]``, and the next hidden state."""
        outputs, new = self.run("actor", inputs, state, first)
        return *gaussian(outputs), new

    def sample(self, inputs: Tensors, state: HiddenState, first: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        """Sample actions in [−1, 1] ``[T, B, K]`` and their log-probability ``[T, B]``."""
        mean, log_std, _ = self.policy(inputs, state, first)
        u, log_prob = tanh_gaussian_draw(mean, log_std, normal)
        return u.tanh(), log_prob

    def perturbed_distance(
        self, batch: Batch, outputs: Tensors, perturbed: Tensors, sum_over_ranks: SumOverRanks = single_rank
    ) -> Tensor:
        """Return the root mean square difference of mean actions in [−1, 1]."""
        both = gaussian(outputs)[0].tanh(), gaussian(perturbed)[0].tanh()
        return rms_distance(*both, batch.real, sum_over_ranks)

    def critic_inputs(self, batch: Batch) -> Tensors:
        return {ACTION: self.flat.join(batch.action).tanh()}

    def critic_values(
        self, inputs: Tensors, action: Tensor, state: HiddenState, first: Tensor, target: bool = False
    ) -> Tensor:
        """Return Q(s, a) of each critic for actions in [−1, 1], ``[T, B, critics]``, or quantiles ``[…, N]`` of it."""
        value = self.run("critic", inputs | {ACTION: action}, state, first, target)[0]["value"]
        if self.config.quantiles:
            return value.unsqueeze(-2) if self.config.critics == 1 else value
        return value if self.config.critics == 1 else value.squeeze(-1)

    def q(self, inputs: Tensors, action: Tensor, state: HiddenState, first: Tensor, target: bool = False) -> Tensor:
        """Return Q(s, a) of each critic for actions in [−1, 1], ``[T, B, critics]``."""
        value = self.critic_values(inputs, action, state, first, target)
        return value.mean(-1) if self.config.quantiles else value

    def taken_q(self, batch: Batch, inputs: Tensors, first: Tensor) -> Tensor:
        return self.critic_values(inputs, self.critic_inputs(batch)[ACTION], batch.state, first)

    def critic_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the loss of the critics; without target networks, of one forward pass over (s, a) and (s', a').

        Batch norms then normalize both pairs by the same statistics.
        """
        if self.config.target_networks:
            losses, metrics = super().critic_loss(batch)
            if self.conservative:
                losses["conservative"] = self.conservative_loss(batch)
            return losses, metrics
        self.networks["actor"].eval()  # by its running statistics, which the loss of the policy updates
        inputs = self.inputs(batch.observation)
        (now, first), (later, first_t) = (at_time(inputs, batch.first, time) for time in (CURRENT, NEXT))
        with torch.no_grad():
            action, log_prob = self.sample(later, batch.state, first_t, batch.experience["next"])
        both = {name: torch.cat([x, later[name]], 1) for name, x in now.items()}
        actions = torch.cat([self.critic_inputs(batch)[ACTION], action], 1)
        q, q_t = self.critic_values(both, actions, batch.state, torch.cat([first, first_t], 1)).chunk(2, 1)
        return self.critic_terms(batch, q, self.soft_targets(batch, *self.soft_value(q_t, log_prob)))

    def conservative_loss(self, batch: Batch) -> Tensor:
        """Return CQL's log ∫ exp Q(s, a) da − Q of the batch's action, summed over critics.

        The integral is estimated from uniform actions and from actions of the policy, N of each.
        """
        inputs, first = at_time(self.inputs(batch.observation), batch.first, CURRENT)
        uniform = batch.experience["uniform"]  # [N, B, K]
        with torch.no_grad():
            mean, log_std, _ = self.policy(inputs, batch.state, first)
            u, log_prob = tanh_gaussian_draw(mean, log_std, batch.experience["several"])
        log_density = torch.cat([torch.full_like(log_prob, -self.flat.size * math.log(2)), log_prob])  # [2N, B]
        actions = torch.cat([uniform, u.tanh(), self.critic_inputs(batch)[ACTION]])
        repeated = {name: x.expand(len(actions), *x.shape[1:]) for name, x in inputs.items()}
        q = self.q(repeated, actions, batch.state, first.expand(len(actions), -1))  # [2N + 1, B, critics]
        gap = sampled_logsumexp(q[:-1], log_density.unsqueeze(-1)) - q[-1]
        return share_sum(gap.sum(-1).unsqueeze(0), batch.share)

    def critic_terms(self, batch: Batch, q: Tensor, target: Tensor) -> tuple[Tensors, Tensors]:
        if not self.config.quantiles:
            return super().critic_terms(batch, q, target)
        loss = share_sum(quantile_critic_loss(q, target, self.taus), batch.share)
        mean = q.detach().mean(-1)  # [T, B, critics]
        metrics = {"q": share_sum(mean.mean(-1), batch.experience[MEAN])}
        return {"critic": loss}, metrics | priority_metric(mean - target.mean(-1, keepdim=True), batch, self.config)

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Also draw the noise of sampling at current, next and intermediate states."""
        batch = super().prepare(batch, sum_over_ranks)
        time, columns = batch.reward.shape
        now = self.draw(batch, time, columns, self.flat.size)
        batch = with_experience(batch, now=now, next=self.draw(batch, time + self.recurrent, columns, self.flat.size))
        if self.conservative:
            shape = (self.config.conservative_samples, columns, self.flat.size)
            uniform = self.draw(batch, *shape, uniform=True).mul_(2).sub_(1)
            batch = with_experience(batch, uniform=uniform, several=self.draw(batch, *shape))
        if not batch.window:
            return batch
        return with_experience(batch, between=self.draw(batch, *batch.window["discount"].shape, self.flat.size))

    @torch.no_grad()
    def target_value(self, batch: Batch, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Return the soft value of target critics at the next states, see ``soft_value``."""
        inputs, first = at_time(inputs, batch.first, self.target_states)
        action, log_prob = self.sample(inputs, batch.state, first, batch.experience["next"])
        with self.target.with_dropout():
            q = self.critic_values(inputs, action, batch.state.select("target"), first, target=True)
        value, bonus = self.soft_value(q, log_prob)
        time = len(batch.reward)
        return value[-time:], bonus[-time:]

    @torch.no_grad()
    def soft_value(self, q: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Return min Q(s, a) − α log π(a|s), and −α log π(a|s) alone, ``[T, B]`` each.

        With quantiles the first is ``[T, B, M]``: those of all critics but the largest, each with the bonus.
        """
        alpha = self.log_alpha.exp()
        bonus = -alpha * log_prob
        if self.config.quantiles:
            return truncated_quantiles(q, self.config.dropped_quantiles) + bonus.unsqueeze(-1), bonus
        return sac_value(q, log_prob, alpha), bonus

    @torch.no_grad()
    def intermediate_bonus(self, batch: Batch) -> Tensor:
        """Return −α log π of a sampled action at each intermediate state of n-step returns, ``[n − 1, B]``.

        Not of the stored action: its probability under the current policy may be near 0, and the bonus unbounded.
        """
        observation, first = intermediate_observations(batch)
        log_prob = self.sample(self.inputs(observation), batch.state, first, batch.experience["between"])[1]
        return -self.log_alpha.exp() * log_prob

    def actor_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return α log π(a|s) − min Q(s, a) of sampled actions, or with the mean over critics."""
        if not self.config.target_networks:  # critics by their running statistics, which stay as they are
            self.networks["critic"].eval()
        inputs, first = at_time(self.inputs(batch.observation), batch.first, CURRENT)
        action, log_prob = self.sample(inputs, batch.state, first, batch.experience["now"])
        q = self.q(inputs, action, batch.state, first)
        if not self.config.pessimistic_actor:
            q = q.mean(-1, keepdim=True)
        loss = share_sum(sac_actor_loss(q, log_prob, self.log_alpha.exp()), batch.share)
        entropy, mean = -log_prob.detach(), batch.experience[MEAN]
        excess = share_sum(entropy - self.target_entropy, mean)
        return {"actor": loss}, {"entropy": share_sum(entropy, mean), EXCESS_ENTROPY: excess}


def gaussian(outputs: Tensors) -> tuple[Tensor, Tensor]:
    """Return mean and log standard deviation ``[T, B, K]`` from the actor's outputs."""
    mean, log_std = outputs["policy"].chunk(2, -1)
    return mean, log_std.clamp(*LOG_STD)
