"""What the actor-critics with a replay share (DDPG, TD3, SAC): flat actions, targets, priorities, the entropy bonus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ludus.agents.off_policy import OffPolicy, with_experience
from ludus.core.batch import Batch, Learned
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec, Shapes
from ludus.core.spec import Spec, Specs, network_inputs
from ludus.core.types import Tensors
from ludus.core.updater import Updater
from ludus.experience.config import ReplayConfig
from ludus.exploration.parameter_noise import ParameterNoise, rms_distance
from ludus.networks.critic import ACTION
from ludus.networks.numpy_actor import NumpyMlp, plain_input, plain_network
from ludus.ops.q_learning import mixed_priority, n_step_targets, soft_n_step_targets, td_target, temperature_loss
from ludus.preprocess.observation import ObsPreprocessor

if TYPE_CHECKING:
    from ludus.agents.sac import SAC
    from ludus.agents.sac_discrete import DiscreteSAC

EXCESS = "excess_entropy"  # what an actor's loss tells: the policy's entropy, less what it should keep
PRIORITY_MIX = 0.9  # share of the largest surprise in a sequence's priority, the rest is the mean (R2D2)
ADAPT_EVERY = 50  # updates between two looks at how far noise on parameters moves actions
BELOW_ONE = 1 - 2**-20  # the largest random action: atanh of it is finite


class FlatActions:
    """All actions as one vector ``[…, K]``, in the order of the specs; refuses what is not bounded numbers."""

    def __init__(self, config: Any, action: Specs) -> None:
        agent = agent_name(config)
        for name, spec in action.items():
            if spec.kind != "continuous":
                raise UserError(
                    f'{agent} needs continuous actions, but "{name}" is {_kind(spec)}: use discrete_sac or dqn for a '
                    "single choice, ppo for anything else."
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
        """``[T, B, K]`` of ``[T, B, …]`` by name."""
        parts = [action[name].reshape(*action[name].shape[:2], size) for name, _, size in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def split(self, flat: Tensor) -> Tensors:
        """``[B, …]`` by name of ``[B, K]``."""
        parts = torch.split(flat, self._sizes, -1) if len(self._parts) > 1 else (flat,)
        return {
            name: part.reshape(len(part), *shape) for (name, shape, _), part in zip(self._parts, parts, strict=True)
        }


def agent_name(config: Any) -> str:
    """The agent's name in messages, by its settings: td3 for TD3Config."""
    return type(config).__name__.removesuffix("Config").lower()


def _kind(spec: Spec) -> str:
    if spec.kind == "binary":
        return f"{spec.size} switches"
    return f"{len(spec.sizes)} choices" if spec.shape else f"a choice of {spec.sizes[0]}"


def unused_rate(**rates: float) -> Iterator[tuple[str, str]]:
    """``learning_rate``, where each network has one of its own."""
    if all(rates.values()):
        yield "learning_rate", f"{', '.join(f'agent.{name}_learning_rate' for name in rates)} take its place"


def observation_shapes(observation: Specs) -> Shapes:
    """What a network gets of an observation, by name."""
    return ObsPreprocessor(network_inputs(observation)).shapes


def actor_and_critics(observation: Specs, action: Specs, config: Any, outputs: int = 1) -> dict[str, NetworkSpec]:
    """An actor with ``outputs`` numbers per action element, and critics of observation and action together."""
    shapes, size = observation_shapes(observation), FlatActions(config, action).size
    if ACTION in shapes:
        raise UserError(f'An observation is called "{ACTION}", as is what a critic gets beside it; rename it.')
    return {
        "actor": NetworkSpec(shapes, {"policy": (outputs * size,)}),
        "critic": NetworkSpec(shapes | {ACTION: (size,)}, {"value": (1,)}, concatenate=True, members=config.critics),
    }


def numpy_actor(agent: OffPolicy) -> NumpyMlp | None:
    """The actor in numpy, where it is a plain MLP on the CPU that sees a single vector; else None."""
    actor: Any = agent.networks["actor"]
    if not (plain_input(agent.preprocess) and plain_network(actor)):
        return None
    return NumpyMlp(actor, "policy", agent.preprocess.modules())


def random_actions(steps: int, batch: int, size: int, generator: torch.Generator) -> Tensor:
    """Uniform in [−1, 1]: what is played before the first update, ``[steps, B, size]``."""
    return torch.rand(steps, batch, size, generator=generator, device=generator.device).mul_(2).sub_(1)


def chunk(numbers: int) -> int:
    """For how many steps to draw at once, where a step takes so many numbers."""
    return max(1, min(128, 2**21 // numbers))


def burned_in(agent: OffPolicy, batch: Batch, action: Callable[[Batch], Tensor] | None) -> Batch:
    """The batch without its burn-in, with the hidden states after it; those of targets lie under ``target``.

    ``action`` gives the actions that critics see, ``[T, B, K]``.
    """
    state = HiddenState()
    if agent.recurrent:
        for name in ("actor", "critic"):
            also = {ACTION: action(batch)} if action is not None and name == "critic" else None
            state |= agent.warm(batch, (name,), also=also)
            if name in agent.followed:
                state |= agent.warm(batch, (name,), target=True, also=also).with_prefix("target")
    return replace(agent.after_burn_in(batch), state=state)


@torch.no_grad()
def adapt(agent: OffPolicy, noise: ParameterNoise, batch: Batch) -> None:
    """Adapt the noise now and then by how far a new perturbation moves actions.

    That which acts stays as it is; it is not measured, as it has stayed behind the policy.
    """
    if agent.updates % ADAPT_EVERY:
        return
    kept = [x.clone() for x in noise.perturbed.parameters()]
    noise.resample(agent.generator)
    seen, first = ends(agent.preprocess(batch.observation), batch.first, start=True)
    networks, state = (agent.networks["actor"], noise.perturbed), batch.state.select("actor")
    noise.adapt(rms_distance(*(network(seen, state, first)[0]["policy"].tanh() for network in networks)))
    torch._foreach_copy_(list(noise.perturbed.parameters()), kept)


def ends(seen: Tensors, first: Tensor, start: bool) -> tuple[Tensors, Tensor]:
    """The states that transitions start from, or those that they lead to: ``[T, B, …]`` of ``[T+1, B, …]``."""
    part = slice(None, -1) if start else slice(1, None)
    return {name: x[part] for name, x in seen.items()}, first[part]


def collected(batch: Batch, bonus: Tensor) -> Tensor:
    """The discounted sum ``[1, B]`` of what is added at the states ``[n − 1, B]`` that n-step returns pass."""
    discount = batch.window["discount"]
    return (discount * bonus.masked_fill(discount == 0, 0)).sum(0, keepdim=True)


def targets(batch: Batch, value: Tensor, config: ReplayConfig, bonus: Tensor | None = None) -> Tensor:
    """What the values of a batch should be, ``[T, B]``, given those of the states that its transitions lead to.

    Rewards and discounts of transitions are n-step sums already; those of sequences are summed here. ``bonus`` is
    what soft values add at states that an n-step return passes: those of ``batch.window`` ``[n − 1, B]``, or in a
    sequence all that its transitions lead to ``[T, B]``.
    """
    if not config.sequence:
        reward = batch.reward if bonus is None else batch.reward + collected(batch, bonus)
        return td_target(reward, batch.discount, value)
    if bonus is not None:
        return soft_n_step_targets(batch.reward, batch.discount, batch.continues, value, bonus, config.n_step)
    return n_step_targets(batch.reward, batch.discount, batch.continues, value, config.n_step)


def surprise(error: Tensor, batch: Batch, config: ReplayConfig) -> Tensors:
    """New priorities ``[B]`` as a metric, of the critics' TD errors ``[T, B, critics]``; none for a uniform replay."""
    if not config.prioritized:
        return {}
    size = error.detach().abs().mean(-1)
    return {"priority": mixed_priority(size, batch.real, PRIORITY_MIX) if config.sequence else size[0]}


def seeded(numbers: Tensor) -> torch.Generator:
    """A generator that acting's own numbers seed: learning's must not know of acting."""
    return torch.Generator(numbers.device).manual_seed(int(numbers[0]))


def soft_targets(agent: SAC | DiscreteSAC, batch: Batch, value: Tensor, bonus: Tensor) -> Tensor:
    """What the critics should say: n-step returns collect the entropy bonus at every state that they pass.

    ``value`` and ``bonus`` are those of the states that transitions lead to, ``[T, B]``.
    """
    if agent.config.n_step == 1:
        return targets(batch, value, agent.config)
    passed = bonus if agent.config.sequence else agent.bonus_passed(batch)
    return targets(batch, value, agent.config, passed)


def soft_alpha_loss(agent: SAC | DiscreteSAC, batch: Batch) -> tuple[Tensors, Tensors]:
    """The temperature rises where the policy has less than the entropy that it should keep."""
    return {"alpha": temperature_loss(agent.log_alpha, -batch.experience[EXCESS], 0.0)}, {}


def soft_losses(agent: SAC | DiscreteSAC, batch: Batch) -> tuple[Tensors, Tensors]:
    """The losses of critics, actor and temperature together."""
    losses, metrics = agent.critic_loss(batch)
    more, found = agent.actor_loss(batch)
    if agent.config.learn_alpha:
        more |= agent.alpha_loss(with_experience(batch, **found))[0]
    return losses | more, metrics | found


def soft_learn(agent: SAC | DiscreteSAC, batch: Batch, updater: Updater) -> Learned:
    """A step each of critics, actor and temperature, all with the temperature of before."""
    metrics = updater.step(agent.critic_loss, batch, "critic")
    priority = metrics.pop("priority", None)
    found = updater.step(agent.actor_loss, batch, "actor")
    metrics |= {"loss/actor": found["loss/actor"], "entropy": found["entropy"]}
    metrics["alpha"] = agent.log_alpha.detach().exp()
    if agent.config.learn_alpha:
        more = with_experience(batch, **{EXCESS: found[EXCESS] / updater.ranks})  # each rank's part of the loss
        metrics["loss/alpha"] = updater.step(agent.alpha_loss, more, "alpha")["loss/alpha"]
    agent.follow()
    return Learned(metrics, priority)
