"""VDN: Q-learning for a team whose value is the sum of its agents' values (Sunehag et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ludus.agents.joint_layout import OWN, JointLayout
from ludus.agents.off_policy import CURRENT, MEAN, OffPolicy
from ludus.agents.parameter_noise import adapt_to_distance
from ludus.agents.replay_actor_critic import at_time, noise_chunk, priority_metric, targets
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
from ludus.core.updater import OptimizerName, Updater
from ludus.experience.config import ReplayConfig
from ludus.exploration.epsilon import Epsilon, epsilon_greedy
from ludus.exploration.parameter_noise import SEED, SIGMA, ParameterNoise, draw_seeds, epsilon_kl, softmax_kl
from ludus.ops.distributions import mask_logits
from ludus.ops.policy_gradient import share_sum
from ludus.ops.q_learning import gather_action, greedy

ENTERED = "entered"  # among the inputs: which agents enter the world, so that the network forgets what it saw of them


@dataclass(frozen=True)
class VDNConfig(ReplayConfig):
    """Settings of VDN."""

    UNUSED = (
        *ReplayConfig.UNUSED,
        UnusedSetting(
            "epsilon_end epsilon_share", "epsilon_schedule", "constant".__eq__, "agent.epsilon_schedule is constant"
        ),
    )
    SCHEDULABLE = (*ReplayConfig.SCHEDULABLE, "tau", "epsilon_start", "parameter_noise")
    UNUSED_OFFLINE = (
        *ReplayConfig.UNUSED_OFFLINE,
        *(f"epsilon_{name}" for name in ("schedule", "start", "end", "share")),
        "parameter_noise",
    )
    batch_size: int = 128  # transitions (or sequences) per update
    updates_per_step: float = 0.25  # gradient updates per environment step: more is slower and more sample-efficient
    learning_rate: float = 5e-4  # raise for speed, lower when the return collapses
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    target_every: int = 200  # updates between two updates of the target networks
    tau: float = 1.0  # Polyak coefficient of that update; 1: a copy
    epsilon_schedule: Literal["linear", "exponential", "constant"] = "linear"  # of ε over the run
    epsilon_start: float = 1.0  # initial ε of each agent; with the constant schedule, that of the whole run
    epsilon_end: float = 0.05  # final ε: raise to keep exploring
    epsilon_share: float = 0.2  # share of the run after which epsilon_end is reached
    # noise on the network's parameters besides ε, adapted so that actions differ as if this were ε, such as 0.1; 0: off
    parameter_noise: float = 0.0
    max_grad_norm: float = 10.0  # gradients are scaled down to this norm; 0: never
    optimizer: OptimizerName = "adam"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    optimizer_eps: float = 1e-8  # raise for smoother steps

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(self, fraction=("parameter_noise",), positive=("target_every", "tau"))


class VDN(OffPolicy):
    """One network gives the values of each agent's choices; their sum learns from the reward of the joint.

    The network gets an agent's own observations and its number, one-hot. The target is that of Double DQN.
    """

    Config: type[Any] = VDNConfig
    layout: Literal["shared", "joint"] = "joint"
    network_names: tuple[str, ...] = ("q",)
    acting = ("q",)
    with_target: tuple[str, ...] = ("q",)

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks)
        self.joint = self.make_joint(observation, action)
        settings = (config.epsilon_start, config.epsilon_end, config.epsilon_share)
        self.epsilon = Epsilon(config.epsilon_schedule, *settings)
        if config.parameter_noise:
            self.parameter_noise = ParameterNoise(networks["q"], SIGMA)

    @classmethod
    def make_joint(cls, observation: Specs, action: Specs) -> JointLayout:
        """Return the agents of a world."""
        return JointLayout(cls.__name__.lower(), observation, action)

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for the network that gives the values of an agent's choices."""
        joint = cls.make_joint(observation, action)
        return {"q": NetworkSpec({OWN: (joint.features + joint.size,)}, {"q": (joint.width,)})}

    def zeros(self, names: tuple[str, ...], batch: int) -> HiddenState:
        """Return the initial hidden state of some networks; that of ``q`` is ``[B, N, …]``."""
        state = super().zeros(names, batch)
        if "q" in names:
            each = super().zeros(("q",), batch * self.joint.size)
            state |= each.map(lambda x: x.view(batch, self.joint.size, *x.shape[1:]))
        return state

    def inputs(self, observation: Tensors) -> Tensors:
        """Add what the network ``q`` gets, ``[T, B, N, F + N]``, and which agents enter the world."""
        ready = super().inputs(observation)
        own = self.joint.own(ready)
        numbers = torch.eye(self.joint.size, device=own.device).expand(*own.shape[:2], -1, -1)
        return ready | {OWN: torch.cat([own, numbers], -1), ENTERED: self.joint.entered(observation)}

    def q(self, inputs: Tensors, state: HiddenState, first: Tensor, target: bool = False) -> tuple[Tensor, HiddenState]:
        """Return the values of all agents' choices, ``[T, B, N, A]``."""
        outputs, new = self.run("q", inputs, state, first, target)
        return outputs["q"], new

    def run(
        self, name: str, observation: Tensors, state: HiddenState, first: Tensor, target: bool = False, **more: Any
    ) -> tuple[Tensors, HiddenState]:
        """Run a network; ``q`` has a row for each agent, which begins anew where the agent enters the world."""
        if name != "q":
            return super().run(name, observation, state, first, target, **more)
        agents = self.joint.size
        given = {OWN: observation[OWN].flatten(1, 2)}
        of_rows = state.select("q").map(lambda x: x.flatten(0, 1)).with_prefix("q")
        begins = (first.unsqueeze(-1) | observation[ENTERED]).flatten(1, 2)
        outputs, new = super().run("q", given, of_rows, begins, target, **more)
        values = {key: x.reshape(len(x), -1, agents, *x.shape[2:]) for key, x in outputs.items()}
        return values, new.map(lambda x: x.reshape(-1, agents, *x.shape[1:]))

    def mix(self, q: Tensor, inputs: Tensors, state: HiddenState, first: Tensor, target: bool = False) -> Tensor:
        """Return the team's value ``[T, B]`` of the agents' values ``[T, B, N]``."""
        return q.sum(-1)

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Draw for each agent whether it explores, and its random choice."""
        agents, choices = self.joint.size, self.joint.width

        def draw(steps: int, g: torch.Generator) -> Tensors:
            drawn = self.epsilon.draw(steps, rows.total * agents, choices, g)
            drawn = {name: x.view(steps, rows.total, agents, *x.shape[2:]) for name, x in drawn.items()}
            return drawn if self.parameter_noise is None else drawn | {SEED: draw_seeds(steps, rows.total, g)}

        return Noise(draw, generator, rows, noise_chunk(rows.total * agents * (choices + 1)))

    @torch.inference_mode()
    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Return each agent's best choice; with ``noise``, a random one with probability ε.

        What the network remembers of an agent stays as it is while the agent is absent.
        """
        outputs, after = self.run_acting(self.step_inputs(step), state, step.first[None], noise)
        q, mask = outputs["q"].squeeze(0), self.joint.masks(step.observation)
        if noise is None:
            chosen = greedy(q, mask)
        else:
            chosen = epsilon_greedy(q, noise["explore"], noise["choice"], self.epsilon.value, mask)
        if after and not self.training:  # in training an absent agent is forgotten when it comes back
            after = after.keep(self.joint.absent(step.observation), state.reset(step.first))
        return AgentStep(dict(zip(self.joint.actions, chosen.unbind(-1), strict=True)), {}, after)

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return the team's value of the agents' best choices."""
        if self.networks.keys() != {"q"}:
            self.refuse_recurrent_value()
        inputs, first = self.step_inputs(step), step.first[None]
        q, active = self.q(inputs, state, first)[0], self.joint.active(step.observation)
        best = gather_action(q, greedy(q, self.joint.masks(step.observation))) * active
        return self.unscale_value(self.mix(best, inputs, state, first).squeeze(0))

    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Scale rewards, apply the burn-in and set shares."""
        batch = self.with_scaled_reward(batch)
        if self.config.sequence:
            state = HiddenState()
            for name in self.networks:
                state |= self.burn_in_state(batch, name)
                state |= self.burn_in_state(batch, name, target=True).with_prefix("target")
            batch = replace(batch.skip_steps(self.config.burn_in), state=state)
        return self.with_shares(batch, sum_over_ranks)

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Take one step, and update the target networks every ``target_every`` updates."""
        batch = self.prepare(batch, updater.sum)
        metrics = updater.step(self.compute_loss, batch, "all")
        self.finish_update(self.config.target_every)
        if self.parameter_noise is not None:
            adapt_to_distance(self, batch, updater)
        return Learned(metrics, metrics.pop("priority", None))

    def perturbed_distance(
        self, batch: Batch, outputs: Tensors, perturbed: Tensors, sum_over_ranks: SumOverRanks = single_rank
    ) -> Tensor:
        """Return the mean KL over agents in the world of the softmax policies of Q and of perturbed Q."""
        now = {name: x[CURRENT] for name, x in batch.observation.items()}
        mask, real = self.joint.masks(now), batch.real.unsqueeze(-1) & self.joint.active(now)
        q, other = (x["q"] if mask is None else mask_logits(x["q"], mask) for x in (outputs, perturbed))
        return softmax_kl(q, other, real, sum_over_ranks)

    @torch.no_grad()
    def td_errors(self, batch: Batch) -> Tensor:
        return self.compute_loss(self.prepare(batch))[1]["priority"]

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the squared TD error of the team's value; agents that have left add nothing to it."""
        inputs, active = self.inputs(batch.observation), self.joint.active(batch.observation)
        q, _ = self.q(inputs, batch.state, batch.first)  # [T + 1, B, N, A]
        chosen = torch.stack([batch.action[name] for name in self.joint.actions], -1)
        taken = gather_action(q[CURRENT], chosen) * active[CURRENT]
        value = self.mix(taken, *self._at(inputs, batch, CURRENT))
        with torch.no_grad():
            target = targets(batch, self._target_value(batch, inputs, q.detach()), self.config)
        error = target - value
        metrics = {"q": share_sum(value.detach(), batch.experience[MEAN])}
        metrics |= priority_metric(error.unsqueeze(-1), batch, self.config)
        return {"value": share_sum(error.square(), batch.share)}, metrics

    def _target_value(self, batch: Batch, inputs: Tensors, q: Tensor) -> Tensor:
        """Return the target networks' team value ``[T, B]`` of the choices that are best online (Double DQN)."""
        states = self.target_states
        later, _, first = self._at(inputs, batch, states)
        old = batch.state.select("target")
        seen = {name: x[states] for name, x in batch.observation.items()}
        best = greedy(q[states], self.joint.masks(seen))
        values = gather_action(self.q(later, old, first, target=True)[0], best) * self.joint.continues(seen)
        return self.mix(values, later, old, first, target=True)[-len(batch.reward) :]

    @staticmethod
    def _at(inputs: Tensors, batch: Batch, states: slice) -> tuple[Tensors, HiddenState, Tensor]:
        """Return inputs, hidden state and ``first`` of some states of a batch."""
        found, first = at_time(inputs, batch.first, states)
        return found, batch.state, first

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Also set ε and the target of parameter noise, and return ε."""
        values = {"epsilon": self.epsilon.update(progress), **super().schedule(progress)}
        if self.parameter_noise is not None:
            sizes = self.joint.sizes
            self.parameter_noise.target = sum(epsilon_kl(self.config.parameter_noise, n) for n in sizes) / len(sizes)
            values["parameter_noise_sigma"] = float(self.parameter_noise.sigma)
        return values
