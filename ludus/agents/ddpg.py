"""DDPG: deterministic policy gradient with a replay buffer (Lillicrap et al. 2016); HDDPG and TD3 are settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import not_
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ludus.agents.off_policy import CURRENT, MEAN, OffPolicy, with_experience
from ludus.agents.parameter_noise import adapt_to_distance
from ludus.agents.replay_actor_critic import (
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
from ludus.core.network import Network, NetworkSpec
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import Group, Updater
from ludus.experience.config import WIDE_MLP, ReplayConfig
from ludus.exploration.action_noise import ActionNoise, make_action_noise, noise_class
from ludus.exploration.parameter_noise import SEED, ParameterNoise, draw_seeds, rms_distance
from ludus.networks.critic import ACTION
from ludus.networks.module_checks import uses_methods_of
from ludus.networks.numpy_actor import NumpyMLP
from ludus.ops.offline import td3_bc_actor_loss
from ludus.ops.policy_gradient import share_sum
from ludus.ops.q_learning import ddpg_actor_loss, hysteretic_weight, min_over_critics, smoothed_action

SIZE = "mean_size"  # of Q, over all ranks


@dataclass(frozen=True)
class DDPGConfig(ReplayConfig):
    """Settings of DDPG; HDDPG and TD3 are combinations of them."""

    NETWORK_DEFAULTS = WIDE_MLP
    UNUSED = (
        *ReplayConfig.UNUSED,
        UnusedSetting("target_noise_clip", "target_noise", not_, "agent.target_noise is 0"),
        UnusedSetting(
            "noise_clip", "noise", "clipped_normal".__ne__, "agent.noise is {}, and only clipped_normal has a clip"
        ),
        UnusedSetting(
            "noise_theta", "noise", "ornstein_uhlenbeck".__ne__, "agent.noise is {}, and only ornstein_uhlenbeck has it"
        ),
    )
    SCHEDULABLE = (
        *ReplayConfig.SCHEDULABLE,
        *("tau", "target_noise", "target_noise_clip", "hysteretic", "bc_alpha", "noise_sigma"),
    )
    UNUSED_OFFLINE = (
        *ReplayConfig.UNUSED_OFFLINE,
        *("noise", "noise_sigma", "noise_sigma_end", "noise_clip", "noise_theta"),
    )
    learning_rate: float = 1e-3  # raise for speed, lower when the return collapses
    actor_learning_rate: float = 0.0  # of the actor; 0: learning_rate
    critic_learning_rate: float = 0.0  # of the critics; 0: learning_rate
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    tau: float = 0.005  # Polyak coefficient of the target networks: higher is faster and less stable
    critics: int = 1  # the target takes their minimum; 2 against overestimation
    policy_delay: int = 1  # updates of the critics per update of the actor and the target networks
    target_noise: float = 0.0  # standard deviation of the noise on target actions (target policy smoothing)
    target_noise_clip: float = 0.5  # bound of that noise
    hysteretic: float = 1.0  # weight of negative TD errors; below 1: optimistic, for concurrent learners
    # weight of Q against imitating the batch's actions, for recorded data: lower imitates more; none: no imitation
    bc_alpha: float | None = None
    # exploration noise on actions: normal, clipped_normal, uniform, ornstein_uhlenbeck, or your own class as
    # package.module:Class; parameter: on the actor's parameters, scaled so that actions differ by noise_sigma
    noise: Annotated[str, "NAME"] = "normal"
    noise_sigma: float = 0.1  # its standard deviation (uniform: its bound), for actions scaled to [-1, 1]
    noise_sigma_end: float | None = None  # its value at nb_step, linearly; none: constant
    noise_clip: float = 2.5  # clipped_normal: bound in standard deviations
    noise_theta: float = 0.15  # ornstein_uhlenbeck: rate of mean reversion
    max_grad_norm: float = 0.0  # gradients are scaled down to this norm; 0: never
    optimizer_eps: float = 1e-8  # raise for smoother steps

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(
            self,
            fraction=("hysteretic",),
            positive=("tau", "critics", "policy_delay", *(["noise_sigma"] if self.noise == "parameter" else [])),
            nonnegative=("target_noise", "target_noise_clip", "actor_learning_rate", "critic_learning_rate"),
        )
        if self.noise != "parameter":
            noise_class(self.noise)
        if self.bc_alpha is not None:
            check_ranges(self, nonnegative=("bc_alpha",))


@dataclass(frozen=True)
class TD3Config(DDPGConfig):
    """TD3 (Fujimoto et al. 2018): DDPG with twin critics, a delayed policy and smoothed targets."""

    critics: int = 2  # the target takes their minimum; 2 against overestimation
    policy_delay: int = 2  # updates of the critics per update of the actor and the target networks
    target_noise: float = 0.2  # standard deviation of the noise on target actions (target policy smoothing)


@dataclass(frozen=True)
class TD3BCConfig(TD3Config):
    """TD3+BC (Fujimoto & Gu 2021): TD3 that also imitates the actions of recorded data, for offline training."""

    PREFERS_OFFLINE = True
    learning_rate: float = 3e-4  # raise for speed, lower when the return collapses
    bc_alpha: float | None = 2.5  # weight of Q against imitating the batch's actions: lower imitates more
    normalize_observation: bool = True  # vectors by mean and standard deviation, saved with the policy


@dataclass(frozen=True)
class HDDPGConfig(DDPGConfig):
    """HDDPG: hysteretic DDPG (after Matignon et al. 2007): down-weights negative TD errors, for concurrent learners."""

    hysteretic: float = 0.5  # weight of negative TD errors; below 1: optimistic, for concurrent learners


class DDPG(OffPolicy):
    """A deterministic policy trained to maximize Q(s, a), with critics trained from a replay buffer."""

    Config: type[Any] = DDPGConfig
    network_names = ("actor", "critic")
    acting, with_target = ("actor",), ("actor", "critic")
    last_actor_loss: Tensor

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks)
        self.flat = FlatActions(config, action)
        kind = "normal" if config.noise == "parameter" else config.noise
        actor, sigma = networks["actor"], config.noise_sigma
        shape = {"clip": config.noise_clip, "theta": config.noise_theta}
        self.noise: ActionNoise = make_action_noise(kind, sigma, config.noise_sigma_end, **shape)
        if config.noise == "parameter":
            self.parameter_noise = ParameterNoise(actor, sigma, sigma)
        self.smooths_targets, self.hysteretic = bool(config.target_noise), config.hysteretic != 1
        self._numpy: NumpyMLP | None = None
        self.register_buffer("last_actor_loss", torch.zeros(()))  # logged at updates that do not step the actor

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for an actor and Q(s, a) critics."""
        return actor_and_critics(observation, action, config)

    @property
    def action_transform(self) -> Mapping[str, str]:
        """Clip actions to [−1, 1] and rescale them to the Box."""
        return dict.fromkeys(self.action, "clip")

    def parameter_groups(self) -> dict[str, Group]:
        """Step critics and actor separately."""
        return {
            "critic": self.make_group(self.networks["critic"].parameters(), self.config.critic_learning_rate),
            "actor": self.make_group(self.networks["actor"].parameters(), self.config.actor_learning_rate),
        }

    def initial_state(self, batch: int) -> HiddenState:
        """Return zeros for the actor, and the state of the action noise."""
        return HiddenState(super().initial_state(batch) | self.noise.initial_state(batch, self.flat.size, self.device))

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Draw action noise, and uniform actions for the warm-up."""
        size, batch = self.flat.size, rows.total

        def draw(steps: int, g: torch.Generator) -> Tensors:
            drawn = {"noise": self.noise.draw(steps, batch, size, g), "random": random_actions(steps, batch, size, g)}
            if self.parameter_noise is not None:
                drawn[SEED] = draw_seeds(steps, batch, g)
            return drawn

        return Noise(draw, generator, rows, noise_chunk(2 * batch * size))

    def use_numpy(self) -> bool:
        """Act in numpy where the actor is a plain MLP on the CPU."""
        ours = uses_methods_of(self, DDPG, ("act", "_act", "inputs", "run", "run_acting"))
        self._numpy = numpy_actor(self) if ours and self.parameter_noise is None else None
        return self._numpy is not None

    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Return the policy's action; with ``noise``, a uniform one until the first update and a noisy one later."""
        if self._numpy is None or not self._numpy.usable():
            action, state = self._act(step, state, noise)
        else:
            action = torch.from_numpy(np.tanh(self._numpy(next(iter(step.observation.values())).numpy())[0]))
        if noise is not None and self.updates == 0:
            action = noise["random"]
        elif noise is not None and self.parameter_noise is None:
            action, state = self.noise.apply(action, noise["noise"], state, step.first)
        return AgentStep(self.flat.split(action), {}, state)

    @torch.inference_mode()
    def _act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> tuple[Tensor, HiddenState]:
        """Run the actor, or the perturbed one."""
        outputs, new = self.run_acting(self.step_inputs(step), state, step.first.unsqueeze(0), noise)
        return outputs["policy"].squeeze(0).tanh(), HiddenState(state | new) if new else state

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return the minimum over critics of Q(s, π(s))."""
        self.refuse_recurrent_value()
        inputs, first = self.step_inputs(step), step.first[None]
        action = self.run("actor", inputs, state, first)[0]["policy"].tanh()
        return self.unscale_value(min_over_critics(self.q(inputs, action, state, first)).squeeze(0))

    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Refuse: the policy is deterministic."""
        raise UserError(
            "DDPG and TD3 have no distribution of actions, since their policy is deterministic; use policy.act."
        )

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Scale rewards, apply the burn-in, set shares and draw the noise of target actions."""
        batch = self.with_shares(apply_burn_in(self, self.with_scaled_reward(batch)), sum_over_ranks)
        if not self.smooths_targets:
            return batch
        time, columns = batch.reward.shape
        return with_experience(batch, target_noise=self.draw(batch, time + self.recurrent, columns, self.flat.size))

    def critic_inputs(self, batch: Batch) -> Tensors:
        return {ACTION: self.flat.join(batch.action)}

    def q(self, inputs: Tensors, action: Tensor, state: HiddenState, first: Tensor, **more: Any) -> Tensor:
        """Return Q(s, a) of each critic for actions in [−1, 1], ``[T, B, critics]``; ``more`` as in ``run``."""
        value = self.run("critic", inputs | {ACTION: action}, state, first, **more)[0]["value"]
        return value if self.config.critics == 1 else value.squeeze(-1)

    @torch.no_grad()
    def target_value(self, batch: Batch, inputs: Tensors) -> Tensor:
        """Return the minimum over target critics of Q(s', π'(s')), ``[T, B]``."""
        config, state = self.config, batch.state.select("target")
        inputs, first = at_time(inputs, batch.first, self.target_states)
        action = self.run("actor", inputs, state, first, target=True)[0]["policy"].tanh()
        if self.smooths_targets:
            normal = batch.experience["target_noise"]
            action = smoothed_action(action, normal, config.target_noise, config.target_noise_clip)
        return min_over_critics(self.q(inputs, action, state, first, target=True))[-len(batch.reward) :]

    @torch.no_grad()
    def td_errors(self, batch: Batch) -> Tensor:
        return self.critic_loss(self.prepare(batch))[1]["priority"]

    def critic_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the squared TD errors of all critics."""
        config, inputs = self.config, self.inputs(batch.observation)
        target = targets(batch, self.target_value(batch, inputs), config)
        now, first = at_time(inputs, batch.first, CURRENT)
        q = self.q(now, self.critic_inputs(batch)[ACTION], batch.state, first)
        squares = (error := target.unsqueeze(-1) - q).square()
        if self.hysteretic:
            squares = hysteretic_weight(error, decrease=config.hysteretic) * squares
        loss = share_sum(squares.sum(-1), batch.share)
        metrics = {"q": share_sum(q.detach().mean(-1), batch.experience[MEAN])}
        return {"critic": loss}, metrics | priority_metric(error, batch, config)

    def actor_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return −Q(s, π(s)) of the first critic; with ``bc_alpha``, TD3+BC's loss."""
        action, q = self.policy_value(batch)
        if self.config.bc_alpha is None:
            return {"actor": share_sum(ddpg_actor_loss(q), batch.share)}, {}
        size = batch.experience.get(SIZE, share_sum(q.detach().abs(), batch.experience[MEAN]))
        loss = td3_bc_actor_loss(q, action, self.critic_inputs(batch)[ACTION], self.config.bc_alpha, size)
        return {"actor": share_sum(loss, batch.share)}, {}

    def policy_value(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return π(s) ``[T, B, K]`` and its value by the first critic ``[T, B]``."""
        inputs, first = at_time(self.inputs(batch.observation), batch.first, CURRENT)
        action = self.run("actor", inputs, batch.state, first)[0]["policy"].tanh()
        alone = {"members": 1} if self.config.critics > 1 else {}
        return action, self.q(inputs, action, batch.state, first, **alone)[..., 0]

    @torch.no_grad()
    def with_size(self, batch: Batch, updater: Updater) -> Batch:
        """Add the mean of |Q(s, π(s))| over all ranks; a single rank has it when it computes the loss."""
        if self.config.bc_alpha is None or updater.ranks == 1:
            return batch
        _, q = self.policy_value(batch)
        return with_experience(batch, **{SIZE: updater.sum(share_sum(q.abs(), batch.experience[MEAN]))})

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return all losses of a prepared batch together; ``learn`` steps each separately."""
        losses, metrics = self.critic_loss(batch)
        return losses | self.actor_loss(batch)[0], metrics

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Step the critics, and every ``policy_delay``-th time the actor and the target networks."""
        batch = self.prepare(batch, updater.sum)
        metrics = updater.step(self.critic_loss, batch, "critic")
        priority = metrics.pop("priority", None)
        if (self.updates + 1) % self.config.policy_delay == 0:
            stepped = updater.step(self.actor_loss, self.with_size(batch, updater), "actor")
            self.last_actor_loss.copy_(stepped["loss/actor"])
        self.finish_update(self.config.policy_delay)
        if self.parameter_noise is not None:
            adapt_to_distance(self, batch, updater)
        return Learned(metrics | {"loss/actor": self.last_actor_loss.clone()}, priority)

    def perturbed_distance(
        self, batch: Batch, outputs: Tensors, perturbed: Tensors, sum_over_ranks: SumOverRanks = single_rank
    ) -> Tensor:
        """Return the root mean square difference of actions in [−1, 1]."""
        return rms_distance(outputs["policy"].tanh(), perturbed["policy"].tanh(), batch.real, sum_over_ranks)

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Also set the noise, and return its level."""
        level = self.noise.update(progress)
        if self.parameter_noise is not None:
            self.parameter_noise.target = level
        return {"noise_sigma": level, **super().schedule(progress)}
