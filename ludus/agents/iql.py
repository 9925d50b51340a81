"""IQL: implicit Q-learning from recorded transitions (Kostrikov et al. 2022), for any actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ludus.agents.off_policy import CURRENT, MEAN, OffPolicy
from ludus.agents.replay_actor_critic import at_time, noise_chunk, priority_metric
from ludus.core.batch import Batch, Learned
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec, Shapes
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.schedule import value_range
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import Tensors
from ludus.core.updater import Updater
from ludus.experience.config import WIDE_MLP, ReplayConfig
from ludus.networks.action_features import ActionFeatures
from ludus.networks.build import network_spec
from ludus.networks.conditional_policy import make_policy
from ludus.networks.critic import ACTION
from ludus.networks.policy_config import PolicyConfig
from ludus.ops.offline import advantage_weight, expectile_loss
from ludus.ops.policy_gradient import share_sum
from ludus.ops.q_learning import critic_loss, min_over_critics, td_target

VALUE: Shapes = {"value": (1,)}
LARGEST_WEIGHT = 100.0  # of a recorded action in the policy's loss, as in the paper's code


@dataclass(frozen=True)
class IQLConfig(PolicyConfig, ReplayConfig):
    """Settings of IQL."""

    NETWORK_DEFAULTS = WIDE_MLP
    PREFERS_OFFLINE = True
    UNUSED_OFFLINE = (*ReplayConfig.UNUSED_OFFLINE, "gsde_interval")
    SCHEDULABLE = (*ReplayConfig.SCHEDULABLE, "tau", "expectile", "temperature")
    learning_rate: float = 3e-4  # raise for speed, lower when the return collapses
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    tau: float = 0.005  # Polyak coefficient of the target networks: higher is faster and less stable
    critics: int = 2  # values are learned from their minimum; 2 against overestimation
    expectile: float = 0.7  # τ: 0.5 values the recorded policy; nearer 1, the best of its actions, and less stable
    temperature: float = 3.0  # β: 0 imitates all actions; higher imitates those with a larger advantage
    normalize_observation: bool = True  # vectors by mean and standard deviation, saved with the policy
    max_grad_norm: float = 0.0  # gradients are scaled down to this norm; 0: never
    optimizer_eps: float = 1e-8  # raise for smoother steps

    def validate(self) -> None:
        """Refuse values that cannot train."""
        PolicyConfig.validate(self)
        ReplayConfig.validate(self)
        check_ranges(self, positive=("tau", "critics"), nonnegative=("temperature",), finite=("expectile",))
        low, high = value_range(self.expectile)
        if not 0 < low <= high < 1:
            raise UserError(f"agent.expectile is {self.expectile:g}; it must be between 0 and 1, such as 0.7.")
        if self.sequence:
            raise UserError(f"agent.sequence is {self.sequence}, but iql learns from single transitions; set it to 0.")

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also settings of the distribution of actions."""
        yield from ReplayConfig.unused(self, observation, action, rows)
        yield from self.unused_distribution(action)


class IQL(OffPolicy):
    """Critics, an expectile of their values, and a policy that imitates recorded actions by their advantage.

    Q is computed of recorded actions alone, never of actions that the data lacks.
    """

    Config: type[Any] = IQLConfig
    network_names = ("actor", "critic", "value")
    acting, with_target = ("actor",), ("critic",)

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        if any(network.recurrent for network in networks.values()):
            raise UserError("iql learns from single transitions, but a network is recurrent; use a feed-forward one.")
        super().__init__(observation, action, config, networks)
        self.policy = make_policy(action, config, self.preprocess.shapes)
        self.policy.rename_masks(self.preprocess.masks)
        self.policy.find_conditional_masks(observation)
        if networks["actor"].orthogonal:
            self.policy.initialize()
        self.features = ActionFeatures(action, self.policy.action_transform)

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for an actor, Q(s, a) critics and a value network."""
        spec = network_spec(observation, VALUE)
        policy = make_policy(action, config, spec.inputs)
        if ACTION in spec.inputs:
            raise UserError(f'An observation is called "{ACTION}", which critics use for the action; rename it.')
        inputs = spec.inputs | {ACTION: (ActionFeatures(action, policy.action_transform).size,)}
        return {
            "actor": spec._replace(outputs=policy.outputs, over=policy.over),
            "critic": spec._replace(inputs=inputs, concatenate=True, members=config.critics),
            "value": spec,
        }

    @property
    def action_transform(self) -> Mapping[str, str]:
        """Return the policy's."""
        return self.policy.action_transform

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Draw the policy's noise."""
        numbers = rows.total * sum(x.numel() for x in self.policy.draw(1, 1, torch.Generator()).values())
        chunk = self.policy.noise_steps or noise_chunk(numbers)
        return Noise(lambda steps, g: self.policy.draw(steps, rows.total, g), generator, rows, chunk)

    @torch.inference_mode()
    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Return the most likely action; with ``noise``, a sample."""
        outputs = self._step_outputs("actor", step)
        return AgentStep(self.policy.sample(outputs, step.observation, noise)[0], {}, state)

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return V(s)."""
        return self.unscale_value(self._step_outputs("value", step)["value"].squeeze(-1))

    @torch.inference_mode()
    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Return the policy's distribution."""
        return self.policy.describe(self._step_outputs("actor", step), step.observation)

    def _step_outputs(self, name: str, step: EnvStep) -> Tensors:
        """Run a network on one step; return its outputs ``[B, …]``."""
        outputs, _ = self.run(name, self.step_inputs(step), HiddenState(), step.first.unsqueeze(0))
        return {key: x.squeeze(0) for key, x in outputs.items()}

    def critic_inputs(self, batch: Batch) -> Tensors:
        return {ACTION: self.features(batch.action, self.policy)}

    def q(self, inputs: Tensors, first: Tensor, target: bool = False) -> Tensor:
        """Return Q(s, a) of each critic, ``[T, B, critics]``; ``inputs`` include the action."""
        value = self.run("critic", inputs, HiddenState(), first, target)[0]["value"]
        return value if self.config.critics == 1 else value.squeeze(-1)

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the losses of value, critics and policy; each has gradients for its own network alone."""
        config, everywhere = self.config, self.inputs(batch.observation)
        now, first = at_time(everywhere, batch.first, CURRENT)
        taken = now | self.critic_inputs(batch)
        with torch.no_grad():
            target_q = min_over_critics(self.q(taken, first, target=True))
        value = self.run("value", everywhere, HiddenState(), batch.first)[0]["value"].squeeze(-1)  # [T+1, B]
        advantage = target_q - value[:-1]
        q = self.q(taken, first)
        target = td_target(batch.reward, batch.discount, value[1:])
        outputs, _ = self.run("actor", now, HiddenState(), first)
        seen = {name: x[:-1] for name, x in batch.observation.items()}  # has the masks
        log_prob = self.policy.evaluate(outputs, batch.action, seen)["log_prob"]
        weight = advantage_weight(advantage, config.temperature, LARGEST_WEIGHT)
        losses = {
            "value": expectile_loss(advantage, config.expectile),
            "critic": critic_loss(q, target),
            "actor": -weight * log_prob,
        }
        found = {"q": q.detach().mean(-1), "value": value[:-1].detach(), "advantage_weight": weight}
        metrics = {name: share_sum(x, batch.experience[MEAN]) for name, x in found.items()}
        metrics |= priority_metric(q - target.unsqueeze(-1), batch, config)
        return {name: share_sum(x, batch.share) for name, x in losses.items()}, metrics

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Step all networks, then the target networks."""
        batch = self.with_shares(self.with_scaled_reward(batch), updater.sum)
        metrics = updater.step(self.compute_loss, batch, "all")
        self.finish_update()
        return Learned(metrics, metrics.pop("priority", None))

    @torch.no_grad()
    def td_errors(self, batch: Batch) -> Tensor:
        return self.compute_loss(self.with_shares(self.with_scaled_reward(batch)))[1]["priority"]
