"""DDPG: deterministic policy gradient with a replay buffer (Lillicrap et al. 2016); HDDPG and TD3 are settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import not_
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ludus.agents.off_policy import MEAN, OffPolicy, with_experience
from ludus.agents.replay_actor_critic import (
    FlatActions,
    actor_and_critics,
    adapt,
    burned_in,
    chunk,
    ends,
    numpy_actor,
    random_actions,
    seeded,
    surprise,
    targets,
    unused_rate,
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
from ludus.experience.config import WIDE, ReplayConfig
from ludus.exploration.action_noise import ActionNoise, NoiseKind, make_action_noise
from ludus.exploration.parameter_noise import ParameterNoise
from ludus.networks.critic import ACTION
from ludus.networks.numpy_actor import NumpyMlp
from ludus.networks.untouched import methods_of
from ludus.ops.policy_gradient import share_sum
from ludus.ops.q_learning import ddpg_actor_loss, hysteretic_weight, min_over_critics, smoothed_action


@dataclass(frozen=True)
class DDPGConfig(ReplayConfig):
    """Settings of DDPG; HDDPG and TD3 are combinations of them."""

    NETWORK_DEFAULTS = WIDE
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
    learning_rate: float = 1e-3  # raise for speed, lower when the return collapses
    actor_learning_rate: float = 0.0  # of the policy alone; 0: learning_rate
    critic_learning_rate: float = 0.0  # of the critics alone; 0: learning_rate
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    tau: float = 0.005  # how far targets move after an update: more is quicker and less steady
    critics: int = 1  # the target takes their minimum; 2 against overestimation
    policy_delay: int = 1  # updates of the critics for one of the policy and the targets
    target_noise: float = 0.0  # deviation of noise on the target's actions, which smooths values
    target_noise_clip: float = 0.5  # that noise's bound
    hysteretic: float = 1.0  # weight of negative TD errors; below 1: optimistic, for concurrent learners
    # what is added to actions to explore; parameter: to the policy's parameters, so that actions differ by noise_sigma
    noise: Literal["normal", "clipped_normal", "uniform", "ornstein_uhlenbeck", "parameter"] = "normal"
    noise_sigma: float = 0.1  # its deviation (uniform: its bound), where the action range is [-1, 1]
    noise_sigma_end: float | None = None  # what it falls to at nb_step; none: it stays
    noise_clip: float = 2.5  # clipped_normal: its bound, in deviations
    noise_theta: float = 0.15  # ornstein_uhlenbeck: how fast it comes back to 0
    max_grad_norm: float = 0.0  # gradients are scaled down to this norm; 0: never
    optimizer_eps: float = 1e-8  # raise for smoother steps

    @property
    def target_every(self) -> int:
        """Targets move when the policy does."""
        return self.policy_delay

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(
            self,
            fraction=("hysteretic",),
            positive=("tau", "critics", "policy_delay", *(["noise_sigma"] if self.noise == "parameter" else [])),
            nonnegative=("target_noise", "target_noise_clip", "actor_learning_rate", "critic_learning_rate"),
        )

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also a learning rate that every network has one of its own for."""
        yield from super().unused(observation, action, rows)
        yield from unused_rate(actor=self.actor_learning_rate, critic=self.critic_learning_rate)


@dataclass(frozen=True)
class TD3Config(DDPGConfig):
    """TD3 (Fujimoto et al. 2018): DDPG with twin critics, a delayed policy and smoothed targets."""

    critics: int = 2  # the target takes their minimum; 2 against overestimation
    policy_delay: int = 2  # updates of the critics for one of the policy and the targets
    target_noise: float = 0.2  # deviation of noise on the target's actions, which smooths values


@dataclass(frozen=True)
class HDDPGConfig(DDPGConfig):
    """HDDPG: hysteretic DDPG (after Matignon et al. 2007): down-weights negative TD errors, for concurrent learners."""

    hysteretic: float = 0.5  # weight of negative TD errors; below 1: optimistic, for concurrent learners


class DDPG(OffPolicy):
    """A deterministic policy trained to maximize Q(s, a), and critics trained from a replay."""

    Config: type[Any] = DDPGConfig
    network_names = ("actor", "critic")
    acting, followed = ("actor",), ("actor", "critic")
    last_actor_loss: Tensor

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks)
        self.flat = FlatActions(config, action)
        kind: NoiseKind = "normal" if config.noise == "parameter" else config.noise
        actor, sigma = networks["actor"], config.noise_sigma  # what parameter noise begins with, and keeps actions at
        shape = {"clip": config.noise_clip, "theta": config.noise_theta}
        self.noise: ActionNoise = make_action_noise(kind, sigma, config.noise_sigma_end, **shape)
        self.parameter_noise = ParameterNoise(actor, sigma, sigma) if config.noise == "parameter" else None
        self._numpy: NumpyMlp | None = None
        self.register_buffer("last_actor_loss", torch.zeros(()))  # to log it where an update leaves the policy alone

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """An actor, and critics of observation and action together; they share nothing."""
        return actor_and_critics(observation, action, config)

    @property
    def action_transform(self) -> Mapping[str, str]:
        """Actions lie in [−1, 1]."""
        return dict.fromkeys(self.action, "clip")

    def parameter_groups(self) -> dict[str, Group]:
        """Critics and actor step apart."""
        return {
            "critic": self.make_group(self.networks["critic"].parameters(), self.config.critic_learning_rate),
            "actor": self.make_group(self.networks["actor"].parameters(), self.config.actor_learning_rate),
        }

    def initial_state(self, batch: int) -> HiddenState:
        """Zeros for the actor, and what the noise remembers."""
        return HiddenState(super().initial_state(batch) | self.noise.initial_state(batch, self.flat.size, self.device))

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """The noise on actions, and random actions in [−1, 1] for the time before the first update."""
        size, batch = self.flat.size, rows.total

        def draw(steps: int, g: torch.Generator) -> Tensors:
            drawn = {"noise": self.noise.draw(steps, batch, size, g), "random": random_actions(steps, batch, size, g)}
            if self.parameter_noise is not None:
                drawn["perturbation"] = torch.randint(2**31, (steps, batch), generator=g, device=g.device)
            return drawn

        return Noise(draw, generator, rows, chunk(2 * batch * size))

    def use_numpy(self) -> bool:
        """Act in numpy where the actor is a plain MLP on the CPU."""
        ours = methods_of(self, DDPG, ("act", "_act", "run"))
        self._numpy = numpy_actor(self) if ours and self.parameter_noise is None else None
        return self._numpy is not None

    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """The policy's action; with ``noise`` a random one before the first update, and later one near it."""
        if self._numpy is None or not self._numpy.applies():
            action, state = self._act(step, state, noise)
        else:
            action = torch.from_numpy(np.tanh(self._numpy(next(iter(step.observation.values())).numpy())))
        if noise is not None and self.updates == 0:
            action = noise["random"]
        elif noise is not None and self.parameter_noise is None:
            action, state = self.noise.apply(action, noise["noise"], state, step.first)
        return AgentStep(self.flat.split(action), {}, state)

    @torch.inference_mode()
    def _act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> tuple[Tensor, HiddenState]:
        """What the policy, or the perturbed one, says."""
        network = self.networks["actor"]
        if noise is not None and self.parameter_noise is not None:
            if self.training:  # an evaluation leaves it as it is
                self.parameter_noise.begin(step.first, seeded(noise["perturbation"]))
            network = self.parameter_noise.perturbed
        seen = self.preprocess({name: x.unsqueeze(0) for name, x in step.observation.items()})
        outputs, new = network(seen, state.select("actor") if state else state, step.first.unsqueeze(0))
        return outputs["policy"].squeeze(0).tanh(), HiddenState(state | new.with_prefix("actor")) if new else state

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """The least that a critic says of the policy's action."""
        self.refuse_memory()
        seen, first = self.preprocess({name: x.unsqueeze(0) for name, x in step.observation.items()}), step.first[None]
        action = self.run("actor", seen, state, first)[0]["policy"].tanh()
        return min_over_critics(self.q(seen, action, state, first)).squeeze(0)

    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """None: the policy is deterministic."""
        raise UserError("DDPG and TD3 have no distribution of actions, as they take a single one; policy.act gives it.")

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Draw the noise of target actions; burn in what remembers."""
        batch = self.weigh(burned_in(self, batch, self.seen_action), sum_over_ranks)
        if not self.config.target_noise:
            return batch
        time, columns = batch.reward.shape
        return with_experience(batch, target_noise=self.draw(time + self.recurrent, columns, self.flat.size))

    def seen_action(self, batch: Batch) -> Tensor:
        """The batch's actions as critics see them, ``[T, B, K]`` in [−1, 1]."""
        return self.flat.join(batch.action)

    def q(self, seen: Tensors, action: Tensor, state: HiddenState, first: Tensor, **more: Any) -> Tensor:
        """What each critic says of actions in [−1, 1], ``[T, B, critics]``; ``more`` as in ``run``."""
        value = self.run("critic", seen | {ACTION: action}, state, first, **more)[0]["value"]
        return value if self.config.critics == 1 else value.squeeze(-1)

    @torch.no_grad()
    def target_value(self, batch: Batch, seen: Tensors) -> Tensor:
        """The least value that target critics give the target policy's next actions, ``[T, B]``."""
        config, first, state = self.config, batch.first, batch.state.select("target")
        if not self.recurrent:  # a memory sees all steps, to be ready for those that count
            seen, first = ends(seen, first, start=False)
        action = self.run("actor", seen, state, first, target=True)[0]["policy"].tanh()
        if config.target_noise:
            normal = batch.experience["target_noise"]
            action = smoothed_action(action, normal, config.target_noise, config.target_noise_clip)
        return min_over_critics(self.q(seen, action, state, first, target=True))[-len(batch.reward) :]

    def critic_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """The squared TD errors of all critics."""
        config, seen = self.config, self.preprocess(batch.observation)
        target = targets(batch, self.target_value(batch, seen), config)
        now, first = ends(seen, batch.first, start=True)
        q = self.q(now, self.seen_action(batch), batch.state, first)
        squares = (error := target.unsqueeze(-1) - q).square()
        if config.hysteretic < 1:
            squares = hysteretic_weight(error, decrease=config.hysteretic) * squares
        loss = share_sum(squares.sum(-1), batch.share)
        metrics = {"q": share_sum(q.detach().mean(-1), batch.experience[MEAN])}
        return {"critic": loss}, metrics | surprise(error, batch, config)

    def actor_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """What the first critic says of the policy's actions, negative."""
        seen, first = ends(self.preprocess(batch.observation), batch.first, start=True)
        action = self.run("actor", seen, batch.state, first)[0]["policy"].tanh()
        alone = {"members": 1} if self.config.critics > 1 else {}
        q = self.q(seen, action, batch.state, first, **alone)[..., 0]
        return {"actor": share_sum(ddpg_actor_loss(q), batch.share)}, {}

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """All losses of a batch that ``prepare`` made ready."""
        losses, metrics = self.critic_loss(batch)
        return losses | self.actor_loss(batch)[0], metrics

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """A step of the critics, and every ``policy_delay``-th time one of the actor and the targets."""
        batch = self.prepare(batch, updater.sum)
        metrics = updater.step(self.critic_loss, batch, "critic")
        priority = metrics.pop("priority", None)
        if (self.updates + 1) % self.config.policy_delay == 0:
            self.last_actor_loss.copy_(updater.step(self.actor_loss, batch, "actor")["loss/actor"])
        self.follow()
        if self.parameter_noise is not None:
            adapt(self, self.parameter_noise, batch)
        return Learned(metrics | {"loss/actor": self.last_actor_loss.clone()}, priority)

    def schedule(self, progress: float) -> Mapping[str, float]:
        """The learning rate and the noise at this share of the run."""
        level = self.noise.set(progress)
        if self.parameter_noise is not None:
            self.parameter_noise.target = level
        return {"noise_sigma": level, **super().schedule(progress)}
