"""Functions that the replay actor-critics share (DDPG, TD3, SAC): flat actions, targets, priorities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ludus.agents.off_policy import OffPolicy
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec
from ludus.core.spec import Specs
from ludus.core.types import Tensors
from ludus.experience.config import ReplayConfig
from ludus.networks.build import network_spec
from ludus.networks.critic import ACTION
from ludus.networks.numpy_actor import NumpyMLP, is_plain_mlp, is_plain_vector
from ludus.ops.q_learning import mixed_priority, n_step_targets, soft_n_step_targets, td_target

PRIORITY_MIX = 0.9  # weight of the largest TD error in a sequence's priority; the rest is for the mean (R2D2)
BELOW_ONE = 1 - 2**-20  # the largest random action: atanh of it is finite


class FlatActions:
    """Joins all actions into one vector ``[…, K]`` and splits it again; refuses all but bounded continuous actions."""

    def __init__(self, config: Any, action: Specs) -> None:
        agent = type(config).__name__.removesuffix("Config").lower()  # td3 for TD3Config
        for name, spec in action.items():
            if spec.kind != "continuous":
                choices = f"{len(spec.sizes)} choices" if spec.shape else f"a choice of {spec.sizes[0]}"
                found = f"{spec.size} switches" if spec.kind == "binary" else choices
                raise UserError(
                    f'{agent} needs continuous actions, but "{name}" is {found}: use discrete_sac or dqn for a single '
                    "choice, ppo for anything else."
                )
            if not spec.bounded.all():
                raise UserError(
                    f'{agent} needs actions with two finite bounds, but "{name}" has low {spec.low} and high '
                    f"{spec.high}: give its Box finite bounds, or use ppo."
                )
        self._parts = [(name, spec.shape, spec.size) for name, spec in action.items()]
        self._sizes = [spec.size for spec in action.values()]
        self.size = sum(self._sizes)

    def join(self, action: Tensors) -> Tensor:
        """Join actions ``[T, B, …]`` by name into ``[T, B, K]``."""
        parts = [action[name].reshape(*action[name].shape[:2], size) for name, _, size in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def split(self, flat: Tensor) -> Tensors:
        """Split ``[B, K]`` into actions ``[B, …]`` by name."""
        parts = torch.split(flat, self._sizes, -1) if len(self._parts) > 1 else (flat,)
        return {
            name: part.reshape(len(part), *shape) for (name, shape, _), part in zip(self._parts, parts, strict=True)
        }


def actor_and_critics(observation: Specs, action: Specs, config: Any, outputs: int = 1) -> dict[str, NetworkSpec]:
    """Specify an actor with ``outputs`` numbers per action element, and Q(s, a) critics."""
    size = FlatActions(config, action).size
    actor = network_spec(observation, {"policy": (outputs * size,)})
    critic = network_spec(observation, {"value": (1,)})
    if ACTION in actor.inputs:
        raise UserError(f'An observation is called "{ACTION}", which critics use for the action; rename it.')
    return {
        "actor": actor,
        "critic": critic._replace(inputs=critic.inputs | {ACTION: (size,)}, concatenate=True, members=config.critics),
    }


def numpy_actor(agent: OffPolicy) -> NumpyMLP | None:
    """Return the actor in numpy where it is a plain MLP of one vector on the CPU, else None."""
    actor: Any = agent.networks["actor"]
    if not (is_plain_vector(agent.preprocess) and is_plain_mlp(actor)):
        return None
    return NumpyMLP(actor, ["policy"], agent.preprocess.modules(), agent.normalizer)


def random_actions(steps: int, batch: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw uniform actions in [−1, 1] for the warm-up, ``[steps, B, size]``."""
    return torch.rand(steps, batch, size, generator=generator, device=generator.device).mul_(2).sub_(1)


def noise_chunk(numbers: int) -> int:
    """Return for how many steps to draw noise at once, at ``numbers`` per step."""
    return max(1, min(128, 2**21 // numbers))


def apply_burn_in(agent: OffPolicy, batch: Batch) -> Batch:
    """Replace the burn-in steps by the hidden states after them; those of target networks are under ``target``."""
    if not agent.recurrent:
        return batch
    state = HiddenState()
    for name in ("actor", "critic"):
        also = agent.critic_inputs(batch) if name == "critic" else None
        state |= agent.burn_in_state(batch, name, also=also)
        if name in agent.with_target:
            state |= agent.burn_in_state(batch, name, target=True, also=also).with_prefix("target")
    return replace(batch.skip_steps(agent.config.burn_in), state=state)


def at_time(inputs: Tensors, first: Tensor, time: slice) -> tuple[Tensors, Tensor]:
    """Return the ``CURRENT`` or the ``NEXT`` states of transitions, ``[T, B, …]`` of ``[T+1, B, …]``."""
    return {name: x[time] for name, x in inputs.items()}, first[time]


def discounted_bonus(batch: Batch, bonus: Tensor) -> Tensor:
    """Return the discounted sum ``[1, B]`` of the bonus ``[n − 1, B]`` at intermediate states of n-step returns."""
    discount = batch.window["discount"]
    return (discount * bonus.masked_fill(discount == 0, 0)).sum(0, keepdim=True)


def targets(batch: Batch, value: Tensor, config: ReplayConfig, bonus: Tensor | None = None) -> Tensor:
    """Return the target values ``[T, B]`` of a batch, given ``value`` of the next states.

    Transitions have n-step rewards and discounts already; sequences are summed here. ``bonus`` is the entropy bonus at
    intermediate states: those of ``batch.window`` ``[n − 1, B]``, or all next states of a sequence ``[T, B]``. Values
    may be quantiles ``[T, B, M]``, and so are the targets then.
    """

    def fit(x: Tensor) -> Tensor:
        return x.unsqueeze(-1) if value.dim() > batch.reward.dim() else x

    if not config.sequence:
        reward = batch.reward if bonus is None else batch.reward + discounted_bonus(batch, bonus)
        return td_target(fit(reward), fit(batch.discount), value)
    sequence = fit(batch.reward), fit(batch.discount), fit(batch.continues), value
    if bonus is not None:
        return soft_n_step_targets(*sequence, fit(bonus), config.n_step)
    return n_step_targets(*sequence, config.n_step)


def priority_metric(error: Tensor, batch: Batch, config: ReplayConfig) -> Tensors:
    """Return new priorities ``[B]`` from TD errors ``[T, B, critics]``; none without prioritized replay."""
    if not config.prioritized:
        return {}
    size = error.detach().abs().mean(-1)
    return {"priority": mixed_priority(size, batch.real, PRIORITY_MIX) if config.sequence else size[0]}
