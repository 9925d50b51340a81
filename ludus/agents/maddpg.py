"""MADDPG: an actor for each agent, trained with critics of all agents' observations and actions (Lowe et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from ludus.agents.joint_layout import OWN, JointLayout
from ludus.agents.off_policy import CURRENT, MEAN, NEXT, OffPolicy, with_experience
from ludus.agents.parameter_noise import adapt_to_distance
from ludus.agents.replay_actor_critic import at_time, noise_chunk, priority_metric, random_actions
from ludus.core.batch import Batch, Learned
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import Group, Updater
from ludus.experience.config import ReplayConfig
from ludus.exploration.action_noise import make_action_noise, noise_class
from ludus.exploration.parameter_noise import (
    SEED,
    SIGMA,
    ParameterNoise,
    draw_seeds,
    epsilon_kl,
    rms_distance,
    softmax_kl,
)
from ludus.networks.build import network_spec
from ludus.networks.critic import ACTION
from ludus.ops.distributions import gumbel, mask_logits, straight_through_sample
from ludus.ops.policy_gradient import share_sum
from ludus.ops.q_learning import ddpg_actor_loss, td_target

CHOSEN = "exploration/policy"  # in the hidden state: which policy of its ensemble each agent follows in this episode


@dataclass(frozen=True)
class MADDPGConfig(ReplayConfig):
    """Settings of MADDPG."""

    NETWORK_DEFAULTS = MappingProxyType({"activation": "relu"})
    SCHEDULABLE = (*ReplayConfig.SCHEDULABLE, "tau", "temperature", "noise_sigma", "parameter_noise")
    UNUSED_OFFLINE = (
        *ReplayConfig.UNUSED_OFFLINE,
        *("noise", "noise_sigma", "noise_sigma_end", "parameter_noise"),
    )
    batch_size: int = 1024  # transitions per update
    updates_per_step: float = 0.05  # more: learns from fewer steps and takes longer; 0.01: one update every 100 steps
    learning_rate: float = 1e-3  # raise for speed, lower when the return collapses
    actor_learning_rate: float = 0.0  # of the actors; 0: learning_rate
    critic_learning_rate: float = 0.0  # of the critics; 0: learning_rate
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.95  # discount: nearer 1 looks further ahead and learns slower
    tau: float = 0.01  # Polyak coefficient of the target networks: higher is faster and less stable
    # each actor raises the values of all agents, not only its own: learns faster where agents work together
    cooperative: bool = False
    # policies of each agent, one of which it draws for an episode: more are harder to exploit and learn slower
    policies: int = 1
    temperature: float = 1.0  # Discrete actions: of the Gumbel-softmax; lower: less biased, noisier gradients
    output_coef: float = 1e-3  # weight of squared policy outputs: higher keeps exploring, as logits stay small
    # Box actions: exploration noise, as of ddpg, or your own class as package.module:Class; Discrete ones are sampled
    noise: Annotated[str, "NAME"] = "normal"
    noise_sigma: float = 0.1  # its standard deviation (uniform: its bound), for actions scaled to [-1, 1]
    noise_sigma_end: float | None = None  # its value at nb_step, linearly; none: constant
    # noise on the actors' parameters as well, adapted so that choices differ as if this were ε, and numbers of a Box by
    # this much, such as 0.1; 0: off
    parameter_noise: float = 0.0
    max_grad_norm: float = 0.5  # gradients of all agents together are scaled down to this norm; 0: never
    optimizer_eps: float = 1e-8  # raise for smoother steps

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(
            self,
            fraction=("parameter_noise",),
            positive=("tau", "policies", "temperature"),
            nonnegative=("actor_learning_rate", "critic_learning_rate", "output_coef"),
        )
        if self.noise == "parameter":
            raise UserError(
                "agent.noise is parameter, which maddpg has as agent.parameter_noise; set that, such as to 0.1."
            )
        noise_class(self.noise)
        if self.normalize_reward:
            raise UserError(
                "agent.normalize_reward is on, but maddpg learns from the rewards of each agent, and the scale would "
                "be that of their mean; scale the rewards in the environment."
            )
        if self.n_step > 1 or self.sequence:
            name = "n_step" if self.n_step > 1 else "sequence"
            raise UserError(
                f"agent.{name} is {getattr(self, name)}, but maddpg learns from single transitions, which hold a "
                "reward for each agent; leave it out."
            )

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also what is about Discrete or Box actions, where there are none."""
        yield from super().unused(observation, action, rows)
        kinds = {spec.kind for spec in action.values()}
        if "categorical" not in kinds:
            yield "temperature", "no agent has a Discrete action"
        if "continuous" not in kinds:
            for name in ("noise", "noise_sigma", "noise_sigma_end"):
                yield name, "no agent has a Box action"


class MADDPG(OffPolicy):
    """Each agent acts on its own observations; its critic, used in training only, gets those and actions of all.

    The networks of all agents are one batched network each for actors and critics. Adam steps every parameter on its
    own, so agents learn as with an optimizer each.
    """

    Config: type[Any] = MADDPGConfig
    uses_agent_rewards = True
    layout: Literal["shared", "joint"] = "joint"
    network_names = ("actor", "critic")
    acting, with_target = ("actor",), ("actor", "critic")

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        if any(network.recurrent for network in networks.values()):
            raise UserError("maddpg learns from single transitions; use a feed-forward network, or qmix, vdn or mappo.")
        super().__init__(observation, action, config, networks)
        self.joint = JointLayout("maddpg", observation, action, continuous=True)
        self.noise = make_action_noise(config.noise, config.noise_sigma, config.noise_sigma_end)
        self.policies = config.policies
        if config.parameter_noise:
            self.parameter_noise = ParameterNoise(networks["actor"], SIGMA, target=1.0)

    @property
    def uses_dataset(self) -> bool:  # type: ignore[override]
        """Whether it learns from recorded steps: not with several policies, as they do not tell which one acted."""
        return bool(self.policies == 1)

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for ``policies`` actors and one critic per agent; critics get what all agents see and do."""
        joint = JointLayout("maddpg", observation, action, continuous=True)
        critic = network_spec(observation, {"value": (1,)})
        inputs = critic.inputs | {ACTION: (joint.size * joint.width,)}
        actors = joint.size * config.policies
        return {
            "actor": NetworkSpec({OWN: (joint.features,)}, {"policy": (joint.width,)}, members=actors),
            "critic": critic._replace(inputs=inputs, concatenate=True, members=joint.size),
        }

    @property
    def action_transform(self) -> Mapping[str, str]:
        """Clip the numbers of a Box to [−1, 1] and rescale them."""
        return {name: "clip" for name, spec in self.action.items() if spec.kind == "continuous"}

    def parameter_groups(self) -> dict[str, Group]:
        """Step critics and actors separately."""
        return {
            "critic": self.make_group(self.networks["critic"].parameters(), self.config.critic_learning_rate),
            "actor": self.make_group(self.networks["actor"].parameters(), self.config.actor_learning_rate),
        }

    def initial_state(self, batch: int) -> HiddenState:
        """Return the state of the noise on Box actions, and which policies act."""
        state = HiddenState()
        if not all(self.joint.discrete):
            state |= self.noise.initial_state(batch, self.joint.size * self.joint.width, self.device)
        if self.policies > 1:
            state[CHOSEN] = torch.zeros(batch, self.joint.size, dtype=torch.int64, device=self.device)
        return state

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Draw what samples choices, noise on the numbers of a Box, and which policies act in a new episode."""
        joint, batch = self.joint, rows.total

        def draw(steps: int, g: torch.Generator) -> Tensors:
            drawn: Tensors = {}
            if any(joint.discrete):
                uniform = torch.rand(steps, batch, joint.size, joint.width, generator=g, device=g.device)
                drawn["gumbel"] = gumbel(uniform)
            if not all(joint.discrete):
                drawn["noise"] = self.noise.draw(steps, batch, joint.size * joint.width, g)
                drawn["random"] = random_actions(steps, batch, joint.size * joint.width, g)
            if self.policies > 1:
                shape = (steps, batch, joint.size)
                drawn["policy"] = torch.randint(self.policies, shape, generator=g, device=g.device)
            return drawn if self.parameter_noise is None else drawn | {SEED: draw_seeds(steps, batch, g)}

        return Noise(draw, generator, rows, noise_chunk(3 * batch * joint.size * joint.width))

    def inputs(self, observation: Tensors) -> Tensors:
        """Add what the actors get, ``[T, B, N · policies, F]``."""
        ready = super().inputs(observation)
        own = self.joint.own(ready)
        return ready | {OWN: own if self.policies == 1 else own.repeat_interleave(self.policies, 2)}

    @torch.inference_mode()
    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Return the most likely choices and the actors' numbers; with ``noise``, samples and noisy numbers.

        Of several policies, one is drawn at the start of each episode; without ``noise`` they take turns.
        """
        joint, experience = self.joint, {}
        chosen = None
        if self.policies > 1:
            drawn = (state[CHOSEN] + 1) % self.policies if noise is None else noise["policy"]
            chosen = experience["policy"] = torch.where(step.first.unsqueeze(-1), drawn, state[CHOSEN])
            state = HiddenState(state | {CHOSEN: chosen})
        outputs, _ = self.run_acting(self.step_inputs(step), HiddenState(), step.first[None], noise)
        output = self.select(outputs, chosen).squeeze(0)
        vectors = self.to_actions(output, joint.masks(step.observation), None if noise is None else noise.get("gumbel"))
        if noise is not None and not all(joint.discrete):
            numbers = noise["random"]
            if self.updates:
                numbers, state = self.noise.apply(vectors.flatten(1), noise["noise"], state, step.first)
            vectors = torch.where(joint.is_discrete, vectors, numbers.view_as(vectors))
        return AgentStep(joint.decode(vectors), experience, state)

    def outputs(self, inputs: Tensors, first: Tensor, chosen: Tensor | None, target: bool = False) -> Tensor:
        """Return the outputs ``[T, B, N, A]`` of the actors, or of those of each agent's policies that are chosen."""
        return self.select(self.run("actor", inputs, HiddenState(), first, target)[0], chosen)

    def select(self, outputs: Tensors, chosen: Tensor | None) -> Tensor:
        """Return the outputs ``[T, B, N, A]`` of the chosen policies; ``chosen`` is None if each agent has one."""
        if chosen is None:
            return outputs["policy"]
        found = self._of_policies(outputs)
        index = chosen.expand(*found.shape[:3])[..., None, None].expand(*found.shape[:3], 1, self.joint.width)
        return found.gather(3, index).squeeze(3)

    def _of_policies(self, outputs: Tensors) -> Tensor:
        """Return outputs of the actors as ``[T, B, N, policies, A]``."""
        found = outputs["policy"]
        return found.reshape(*found.shape[:2], self.joint.size, self.policies, self.joint.width)

    def to_actions(self, output: Tensor, mask: Tensor | None, noise: Tensor | None) -> Tensor:
        """Turn outputs ``[..., N, A]`` into actions: tanh, and one-hot choices, the most likely ones without noise."""
        joint = self.joint
        numbers = output.tanh() * joint.exists
        if not any(joint.discrete):
            return numbers
        logits = output if mask is None else mask_logits(output, mask)
        noise = torch.zeros_like(logits) if noise is None else noise
        choices = straight_through_sample(logits, noise, self.config.temperature)
        return choices if all(joint.discrete) else torch.where(joint.is_discrete, choices, numbers)

    def q(self, inputs: Tensors, actions: Tensor, first: Tensor, target: bool = False) -> Tensor:
        """Return each agent's Q ``[T, B, N]`` of all agents' actions ``[T, B, N·A]``, or ``[T, B, N, N·A]``."""
        return self.run("critic", inputs | {ACTION: actions}, HiddenState(), first, target)[0]["value"].squeeze(-1)

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return the mean over agents of Q, as the reward of the world is the mean of theirs; 0 for one that has left.

        Its action is zero for the others' critics, as in training.
        """
        inputs, first = self.step_inputs(step), step.first[None]
        seen = {name: x[None] for name, x in step.observation.items()}
        active = self.joint.active(seen)
        actions = self.to_actions(self.outputs(inputs, first, state.get(CHOSEN)), self.joint.masks(seen), None)
        q = self.q(inputs, (actions * active.unsqueeze(-1)).flatten(2), first) * active
        return self.unscale_value(q.mean(-1).squeeze(0))

    @torch.no_grad()
    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Add the agents' rewards, discounts, actions and shares, and draw what samples choices.

        An agent that has left has share 0, and its action is zero for the others' critics.
        """
        joint, config = self.joint, self.config
        now, later = ({name: x[part] for name, x in batch.observation.items()} for part in (CURRENT, NEXT))
        active, reward = joint.active(now), joint.rewards(later)
        # a wrapper may end the world, whose agents do not know of it
        ended = joint.terminated(later) | (joint.active(later) & batch.terminated.unsqueeze(-1))
        batch = self.with_shares(batch, sum_over_ranks)
        added = {
            "reward": reward,
            "discount": config.gamma * (~ended).float(),
            "share": active * batch.weight.unsqueeze(-1) / sum_over_ranks(active.sum((0, 1))).clamp(min=1),
            "continues": (joint.continues(later) & ~ended).float(),
            "actions": joint.encode(batch.action) * active.unsqueeze(-1),
        }
        if any(joint.discrete):
            uniform = self.draw(batch, 2, *active.shape, joint.width, uniform=True)
            added["gumbel"], added["target_gumbel"] = gumbel(uniform).unbind()
        return with_experience(batch, **added)

    def critic_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the squared TD errors of all agents' critics."""
        given, inputs = batch.experience, self.inputs(batch.observation)
        with torch.no_grad():
            later, first = at_time(inputs, batch.first, NEXT)
            mask = self.joint.masks({name: x[NEXT] for name, x in batch.observation.items()})
            output = self.outputs(later, first, given.get("policy"), target=True)
            actions = self.to_actions(output, mask, given.get("target_gumbel")) * given["continues"].unsqueeze(-1)
            target = td_target(given["reward"], given["discount"], self.q(later, actions.flatten(2), first, True))
        now, first = at_time(inputs, batch.first, CURRENT)
        q = self.q(now, given["actions"].flatten(2), first)
        error = target - q
        metrics = {"q": share_sum(q.detach().mean(-1), batch.experience[MEAN])}
        seen = error * (given["share"] > 0)
        return {"critic": share_sum(error.square(), given["share"])}, metrics | priority_metric(
            seen, batch, self.config
        )

    def actor_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return −Q of each agent's critic, given that agent's new action and the others' actions of the replay.

        If cooperative, given the new actions of all, so that each actor learns from the critics of all.
        """
        joint, given = self.joint, batch.experience
        inputs, first = at_time(self.inputs(batch.observation), batch.first, CURRENT)
        now = {name: x[CURRENT] for name, x in batch.observation.items()}
        output = self.outputs(inputs, first, given.get("policy"))
        new = self.to_actions(output, joint.masks(now), given.get("gumbel"))
        # the actions that each critic gets, [T, B, N critics, N agents, A]
        if self.config.cooperative:
            actions = (new * joint.active(now).unsqueeze(-1)).unsqueeze(2).expand(-1, -1, joint.size, -1, -1)
        else:
            own = torch.eye(joint.size, dtype=torch.bool, device=new.device).unsqueeze(-1)  # [N, N, 1]
            actions = torch.where(own, new.unsqueeze(2), given["actions"].unsqueeze(2))
        q = self.q(inputs, actions.flatten(3), first)
        squares = (output.square() * joint.exists).sum(-1) / joint.exists.sum(-1)
        return {
            "actor": share_sum(ddpg_actor_loss(q), given["share"]),
            "output": share_sum(squares, given["share"]),
        }, {}

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return all losses of a prepared batch together; ``learn`` steps each separately."""
        losses, metrics = self.critic_loss(batch)
        return losses | self.actor_loss(batch)[0], metrics

    @torch.no_grad()
    def td_errors(self, batch: Batch) -> Tensor:
        return self.critic_loss(self.prepare(batch))[1]["priority"]

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Step the critics, then the actors, then the target networks."""
        batch = self.prepare(batch, updater.sum)
        metrics = updater.step(self.critic_loss, batch, "critic")
        actor = updater.step(self.actor_loss, batch, "actor")
        self.finish_update()
        if self.parameter_noise is not None:
            adapt_to_distance(self, batch, updater)
        priority = metrics.pop("priority", None)
        return Learned(metrics | {name: x for name, x in actor.items() if name.startswith("loss/")}, priority)

    def perturbed_distance(
        self, batch: Batch, outputs: Tensors, perturbed: Tensors, sum_over_ranks: SumOverRanks = single_rank
    ) -> Tensor:
        """Return how far the policies are from perturbed ones, relative to ``parameter_noise``: the mean over agents.

        For choices this is the KL, relative to that of ε-greedy choices; for a Box, the root mean square difference.
        """
        joint, level = self.joint, self.config.parameter_noise
        now = {name: x[CURRENT] for name, x in batch.observation.items()}
        active, mask, found = joint.active(now), joint.masks(now), []
        for i, (size, discrete) in enumerate(zip(joint.sizes, joint.discrete, strict=True)):
            both = [self._of_policies(x)[:, :, i, :, :size] for x in (outputs, perturbed)]  # [T, B, policies, size]
            real = (batch.real & active[..., i]).unsqueeze(-1).expand(*both[0].shape[:3])
            if not discrete:
                found.append(rms_distance(both[0].tanh(), both[1].tanh(), real, sum_over_ranks) / level)
                continue
            allowed = None if mask is None else mask[..., i, None, :size]
            q, other = (x if allowed is None else mask_logits(x, allowed) for x in both)
            found.append(softmax_kl(q, other, real, sum_over_ranks) / epsilon_kl(level, size))
        return torch.stack(found).nanmean()  # without agents that are in none of the rows

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Return the learning rate, the noise on Box actions and σ of parameter noise at this share of the run."""
        sigma = {"noise_sigma": self.noise.update(progress)}
        values = {**super().schedule(progress), **({} if all(self.joint.discrete) else sigma)}
        if self.parameter_noise is not None:
            values["parameter_noise_sigma"] = float(self.parameter_noise.sigma)
        return values
