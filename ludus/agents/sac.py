"""SAC: soft actor-critic with a learned temperature (Haarnoja et al. 2018b), for continuous actions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import not_
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ludus.agents.off_policy import MEAN, OffPolicy, states_passed, with_experience
from ludus.agents.replay_actor_critic import (
    BELOW_ONE,
    EXCESS,
    FlatActions,
    actor_and_critics,
    burned_in,
    chunk,
    ends,
    numpy_actor,
    random_actions,
    soft_alpha_loss,
    soft_learn,
    soft_losses,
    soft_targets,
    surprise,
    unused_rate,
)
from ludus.core.batch import Batch, Learned
from ludus.core.config import UnusedSetting
from ludus.core.errors import check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import Group, Updater
from ludus.experience.config import WIDE, ReplayConfig
from ludus.networks.critic import ACTION
from ludus.networks.numpy_actor import NumpyMlp
from ludus.networks.untouched import methods_of
from ludus.ops.distributions import tanh_gaussian_draw, tanh_gaussian_sample
from ludus.ops.policy_gradient import share_sum
from ludus.ops.q_learning import sac_actor_loss, sac_critic_loss, sac_value

LOG_STD = (-20.0, 2.0)  # bounds of the policy's log-deviation


@dataclass(frozen=True)
class SACConfig(ReplayConfig):
    """Settings of SAC."""

    NETWORK_DEFAULTS = WIDE
    UNUSED = (
        *ReplayConfig.UNUSED,
        UnusedSetting(
            "alpha_learning_rate target_entropy", "learn_alpha", not_, "agent.learn_alpha is off, so alpha stays"
        ),
    )
    learning_rate: float = 3e-4  # raise for speed, lower when the return collapses
    actor_learning_rate: float = 0.0  # of the policy alone; 0: learning_rate
    critic_learning_rate: float = 0.0  # of the critics alone; 0: learning_rate
    alpha_learning_rate: float = 0.0  # of the temperature alone; 0: learning_rate
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    tau: float = 0.005  # how far targets move after an update: more is quicker and less steady
    critics: int = 2  # the target takes their minimum; 2 against overestimation
    alpha: float = 1.0  # temperature: weight of the entropy bonus (the first value, if learned); raise to explore more
    learn_alpha: bool = True  # learn the temperature so that the entropy stays near target_entropy
    # none: minus the number of action elements; lower for a more deterministic policy
    target_entropy: float | None = None
    max_grad_norm: float = 0.0  # gradients are scaled down to this norm; 0: never
    optimizer_eps: float = 1e-8  # raise for smoother steps

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        rates = ("actor_learning_rate", "critic_learning_rate", "alpha_learning_rate")
        check_ranges(self, positive=("tau", "critics", "alpha"), nonnegative=rates)
        if self.target_entropy is not None:
            check_ranges(self, finite=("target_entropy",))

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also a learning rate that every part has one of its own for."""
        yield from super().unused(observation, action, rows)
        alpha = {"alpha": self.alpha_learning_rate} if self.learn_alpha else {}
        yield from unused_rate(actor=self.actor_learning_rate, critic=self.critic_learning_rate, **alpha)


class SAC(OffPolicy):
    """A policy of Gaussians squashed by tanh that seeks reward and entropy, with critics learned from a replay.

    Actions are stored as u before tanh; critics see tanh(u).
    """

    Config: type[Any] = SACConfig
    network_names = ("actor", "critic")
    acting = ("actor",)
    followed = ("critic",)
    log_alpha: Tensor

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks)
        self.flat = FlatActions(config, action)
        self.target_entropy = -float(self.flat.size) if config.target_entropy is None else config.target_entropy
        self._numpy: NumpyMlp | None = None
        log_alpha = torch.tensor(math.log(config.alpha))
        if config.learn_alpha:
            self.log_alpha = nn.Parameter(log_alpha)
        else:
            self.register_buffer("log_alpha", log_alpha)

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """An actor, and critics of observation and action together; they share nothing."""
        return actor_and_critics(observation, action, config, outputs=2)

    @property
    def soft(self) -> bool:
        """Values include the policy's entropy."""
        return True

    @property
    def action_transform(self) -> Mapping[str, str]:
        """The environment gets tanh(u)."""
        return dict.fromkeys(self.action, "tanh")

    def parameter_groups(self) -> dict[str, Group]:
        """Critics, actor and temperature step apart."""
        config = self.config
        groups = {
            "critic": self.make_group(self.networks["critic"].parameters(), config.critic_learning_rate),
            "actor": self.make_group(self.networks["actor"].parameters(), config.actor_learning_rate),
        }
        if isinstance(self.log_alpha, nn.Parameter):
            groups["alpha"] = self.make_group([self.log_alpha], config.alpha_learning_rate)
        return groups

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """What the policy samples with, and random actions for the time before the first update."""
        size, batch = self.flat.size, rows.total

        def draw(steps: int, g: torch.Generator) -> Tensors:
            normal = torch.randn(steps, batch, size, generator=g, device=g.device)
            random = random_actions(steps, batch, size, g).clamp_(-BELOW_ONE, BELOW_ONE).atanh_()
            return {"normal": normal, "random": random}

        return Noise(draw, generator, rows, chunk(2 * batch * size))

    def use_numpy(self) -> bool:
        """Act in numpy where the actor is a plain MLP on the CPU."""
        ours = methods_of(self, SAC, ("act", "_act", "policy", "run"))
        self._numpy = numpy_actor(self) if ours else None
        return self._numpy is not None

    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """The middle of the policy; with ``noise`` a random action before the first update, later a sample."""
        if self._numpy is None or not self._numpy.applies():
            u, state = self._act(step, state, noise)
        else:
            mean, log_std = np.split(self._numpy(next(iter(step.observation.values())).numpy()), 2, axis=1)
            if noise is not None:
                mean = mean + np.exp(np.clip(log_std, *LOG_STD)) * noise["normal"].numpy()
            u = torch.from_numpy(mean)
        u = noise["random"] if noise is not None and self.updates == 0 else u
        return AgentStep(self.flat.split(u), {}, state)

    @torch.inference_mode()
    def _act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> tuple[Tensor, HiddenState]:
        seen = self.preprocess({name: x.unsqueeze(0) for name, x in step.observation.items()})
        mean, log_std, new = self.policy(seen, state, step.first.unsqueeze(0))
        u = mean if noise is None else tanh_gaussian_sample(mean, log_std, noise["normal"])
        return u.squeeze(0), HiddenState(state | new) if new else state

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """The least that a critic says of the policy's middle action."""
        self.refuse_memory()
        seen, first = self.preprocess({name: x.unsqueeze(0) for name, x in step.observation.items()}), step.first[None]
        return self.q(seen, self.policy(seen, state, first)[0].tanh(), state, first).amin(-1).squeeze(0)

    @torch.inference_mode()
    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Mean and deviation before tanh."""
        seen = self.preprocess({name: x.unsqueeze(0) for name, x in step.observation.items()})
        mean, log_std, _ = self.policy(seen, state, step.first[None])
        parts = {"mean_before_tanh": mean.squeeze(0), "std_before_tanh": log_std.exp().squeeze(0)}
        split = {key: self.flat.split(x) for key, x in parts.items()}
        return {name: {key: x[name] for key, x in split.items()} for name in self.action}

    def policy(self, seen: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensor, Tensor, HiddenState]:
        """Mean and log-deviation ``[T, B, K]`` of the policy, and the hidden state after."""
        outputs, new = self.run("actor", seen, state, first)
        mean, log_std = outputs["policy"].chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD), new

    def sample(self, seen: Tensors, state: HiddenState, first: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in [−1, 1] ``[T, B, K]`` and their log-probability ``[T, B]``."""
        mean, log_std, _ = self.policy(seen, state, first)
        u, log_prob = tanh_gaussian_draw(mean, log_std, normal)
        return u.tanh(), log_prob

    def seen_action(self, batch: Batch) -> Tensor:
        """The batch's actions as critics see them, ``[T, B, K]`` in [−1, 1]."""
        return self.flat.join(batch.action).tanh()

    def q(self, seen: Tensors, action: Tensor, state: HiddenState, first: Tensor, target: bool = False) -> Tensor:
        """What each critic says of actions in [−1, 1], ``[T, B, critics]``."""
        value = self.run("critic", seen | {ACTION: action}, state, first, target)[0]["value"]
        return value if self.config.critics == 1 else value.squeeze(-1)

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Draw what the policy samples with, now, next and at states that n-step returns pass; burn in a memory."""
        batch = self.weigh(burned_in(self, batch, self.seen_action), sum_over_ranks)
        time, columns = batch.reward.shape
        now = self.draw(time, columns, self.flat.size)
        batch = with_experience(batch, now=now, next=self.draw(time + self.recurrent, columns, self.flat.size))
        if not batch.window:
            return batch
        return with_experience(batch, passed=self.draw(*batch.window["discount"].shape, self.flat.size))

    @torch.no_grad()
    def target_value(self, batch: Batch, seen: Tensors) -> tuple[Tensor, Tensor]:
        """The target critics' least value of the policy's next actions with −α log π, and that alone, ``[T, B]``."""
        first = batch.first
        if not self.recurrent:  # a memory sees all steps, to be ready for those that count
            seen, first = ends(seen, first, start=False)
        action, log_prob = self.sample(seen, batch.state, first, batch.experience["next"])
        q = self.q(seen, action, batch.state.select("target"), first, target=True)
        alpha, time = self.log_alpha.exp(), len(batch.reward)
        return sac_value(q, log_prob, alpha)[-time:], -alpha * log_prob[-time:]

    @torch.no_grad()
    def bonus_passed(self, batch: Batch) -> Tensor:
        """−α log π of an action that the policy takes at each state that n-step returns pass, ``[n − 1, B]``.

        Not of the action that was stored: a policy that has moved on since may call it all but impossible, which would
        be an endless bonus.
        """
        observation, first = states_passed(batch)
        log_prob = self.sample(self.preprocess(observation), batch.state, first, batch.experience["passed"])[1]
        return -self.log_alpha.exp() * log_prob

    def critic_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Half the squared TD errors of all critics."""
        seen = self.preprocess(batch.observation)
        value, bonus = self.target_value(batch, seen)
        target = soft_targets(self, batch, value, bonus)
        now, first = ends(seen, batch.first, start=True)
        q = self.q(now, self.seen_action(batch), batch.state, first)
        loss = share_sum(sac_critic_loss(q, target), batch.share)
        metrics = {"q": share_sum(q.detach().mean(-1), batch.experience[MEAN])}
        return {"critic": loss}, metrics | surprise(q - target.unsqueeze(-1), batch, self.config)

    def actor_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """What the critics say of the policy's actions, negative, and its entropy's worth."""
        seen, first = ends(self.preprocess(batch.observation), batch.first, start=True)
        action, log_prob = self.sample(seen, batch.state, first, batch.experience["now"])
        q = self.q(seen, action, batch.state, first)
        loss = share_sum(sac_actor_loss(q, log_prob, self.log_alpha.exp()), batch.share)
        entropy, mean = -log_prob.detach(), batch.experience[MEAN]
        excess = share_sum(entropy - self.target_entropy, mean)
        return {"actor": loss}, {"entropy": share_sum(entropy, mean), EXCESS: excess}

    def alpha_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """The temperature's; of a batch that has what ``actor_loss`` told."""
        return soft_alpha_loss(self, batch)

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """All losses of a batch that ``prepare`` made ready."""
        return soft_losses(self, batch)

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """A step each of critics, actor and temperature."""
        return soft_learn(self, self.prepare(batch, updater.sum), updater)
