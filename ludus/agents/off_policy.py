"""What all agents that learn from a replay share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.environment import GoalReward
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network
from ludus.core.rows import Rows
from ludus.core.spec import Specs, network_inputs
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.experience.hindsight import RewardFunction
from ludus.experience.replay import ExperienceReplay
from ludus.networks.target import Target
from ludus.ops.policy_gradient import shares
from ludus.preprocess.observation import ObsPreprocessor

MEAN = "mean_share"  # what a row counts in a mean of weights that add up to 1


class OffPolicy(Agent):
    """Networks, targets that follow some of them, a replay, and sequences whose first steps only warm a memory up.

    A subclass names in ``acting`` the networks that choose actions (their hidden states are stored) and in
    ``followed`` those that targets follow; ``more`` are modules of its own that targets follow too.
    """

    acting: tuple[str, ...]
    followed: tuple[str, ...]

    def __init__(
        self,
        observation: Specs,
        action: Specs,
        config: Any,
        networks: Mapping[str, Network],
        more: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.observation, self.action = config, observation, action
        self.networks = nn.ModuleDict(networks)
        self.target = Target({name: networks[name] for name in self.followed} | dict(more or {}))
        self.preprocess = ObsPreprocessor(network_inputs(observation))
        self.recurrent = any(network.recurrent for network in networks.values())
        if self.recurrent and not config.sequence:
            raise UserError(
                "The network has a memory, which learns from sequences: set agent.sequence, such as to 20, and "
                "agent.burn_in, such as to 10; or take a network without one."
            )
        # of the first group of parameters
        self.learning_rate: float = getattr(config, "critic_learning_rate", 0.0) or config.learning_rate
        self.generator = torch.Generator()  # of what learning draws; the container seeds it
        self.updates, self.progress = 0, 0.0

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def action_transform(self) -> Mapping[str, str]:
        """Actions are the environment's own, unless a subclass says otherwise."""
        return {}

    @property
    def soft(self) -> bool:
        """Whether values include an entropy bonus, which n-step returns then collect at every state that they pass."""
        return False

    def initial_state(self, batch: int) -> HiddenState:
        """Zeros for the networks that act, named network/place/name."""
        return self.zeros(self.acting, batch)

    def zeros(self, names: tuple[str, ...], batch: int) -> HiddenState:
        """The hidden state that some networks start from."""
        state = HiddenState()
        for name in names:
            state |= self.networks[name].initial_state(batch).with_prefix(name)  # type: ignore[operator]
        return state

    def check_trainable(self) -> None:
        """Refuse sequences for networks without a memory."""
        if self.config.sequence and not self.recurrent:
            raise UserError(
                f"agent.sequence is {self.config.sequence}, but the network has no memory that needs sequences; set "
                "network.body to lstm, or agent.sequence, agent.burn_in and agent.overlap to 0."
            )

    @property
    def needs_goal_reward(self) -> bool:  # type: ignore[override]
        """Whether goals are replaced, so that rewards are computed anew."""
        return bool(self.config.hindsight)

    def make_cache(self, rows: Rows) -> ExperienceReplay:
        """The replay that the settings describe."""
        reward = None if self.goal_reward is None else _of_tensors(self.goal_reward)
        kept = (self.action, self.initial_state(1), self.soft)
        return ExperienceReplay(self.config, rows.size, self.config.gamma, self.observation, self.device, reward, *kept)

    def draw(self, *shape: int, uniform: bool = False) -> Tensor:
        """Random numbers for learning, normal unless ``uniform``."""
        made = torch.rand if uniform else torch.randn
        return made(*shape, generator=self.generator).to(self.device)

    def run(
        self, name: str, observation: Tensors, state: HiddenState, first: Tensor, target: bool = False, **more: Any
    ) -> tuple[Tensors, HiddenState]:
        """The outputs of a network, or of its target, on what ``preprocess`` gave ``[T, B, …]``.

        ``more`` is for networks of some kinds: an ensemble takes ``members``.
        """
        network = (self.target.networks if target else self.networks)[name]
        outputs, new = network(observation, state.select(name) if state else state, first, **more)
        return outputs, new.with_prefix(name) if new else new

    @torch.no_grad()
    def warm(
        self, batch: Batch, names: tuple[str, ...], target: bool = False, also: Tensors | None = None
    ) -> HiddenState:
        """The hidden states after the burn-in; those of networks that do not act start it from zero.

        ``also`` is what they see beside the observations, ``[T, B, …]``: a critic the actions.
        """
        steps, columns = self.config.burn_in, batch.reward.shape[1]
        start = self.zeros(names, columns).map(lambda x: x.to(self.device))
        start |= {name: x for name, x in batch.state.items() if name in start}
        if not steps:
            return start
        observation = self.preprocess({name: x[:steps] for name, x in batch.observation.items()})
        observation |= {name: x[:steps] for name, x in (also or {}).items()}
        state = HiddenState()
        for name in names:
            state |= self.run(name, observation, start, batch.first[:steps], target)[1]
        return state

    def after_burn_in(self, batch: Batch) -> Batch:
        """What is learned from."""
        return batch.skip_steps(self.config.burn_in) if self.config.burn_in else batch

    def refuse_memory(self) -> None:
        """Refuse a value where the critic has a memory, which is not kept while acting."""
        if self.recurrent:
            raise UserError(
                f"{type(self).__name__} has no value here: its critic has a memory (network.body lstm), which is kept "
                "in learning alone; a2c, ppo and dqn give values with a memory too."
            )

    def weigh(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Set each row's share of a mean over real rows, times its importance weight, for losses.

        Beside it ``MEAN``, in proportion to that and 1 in sum, for metrics.
        """
        share = shares(batch.real, batch.weight, sum_over_ranks)
        mean = share / sum_over_ranks(share.sum()).clamp(min=1e-8) if self.config.prioritized else share
        return replace(batch, share=share, experience=batch.experience | {MEAN: mean})

    def follow(self) -> None:
        """Count an update, and move the targets if it is time."""
        self.updates += 1
        every = getattr(self.config, "target_every", 1)
        if self.updates % every == 0:
            self.target.follow(self.config.tau)

    def schedule(self, progress: float) -> Mapping[str, float]:
        """The learning rate at this share of the run."""
        self.progress = progress
        if self.config.learning_rate_schedule == "linear":
            return {"learning_rate": self.learning_rate * max(1 - progress, 0.0)}
        return {}

    def get_extra_state(self) -> dict[str, float]:
        """The number of updates, which decides when targets move, and the progress that exploration follows."""
        return {"updates": self.updates, "progress": self.progress}

    def set_extra_state(self, state: Any) -> None:
        """Go on from there."""
        self.updates = int(state["updates"])
        self.schedule(state["progress"])


def _of_tensors(goal_reward: GoalReward) -> RewardFunction:
    """The environments' rewards and endings of goals, which are numpy's, for a replay on any device."""

    def judge(reached: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        reward, ends = goal_reward(reached.cpu().numpy(), wanted.cpu().numpy())
        device = reached.device
        return torch.from_numpy(reward).to(device), None if ends is None else torch.from_numpy(ends).to(device)

    return judge


def states_passed(batch: Batch) -> tuple[Tensors, Tensor]:
    """The observations ``[n − 1, B, …]`` of the states that n-step returns pass, and ``first`` of them: none is."""
    start = "observation/"
    observation = {name.removeprefix(start): x for name, x in batch.window.items() if name.startswith(start)}
    return observation, torch.zeros_like(batch.window["discount"], dtype=torch.bool)


def with_experience(batch: Batch, **more: Tensor) -> Batch:
    """The batch with more for its loss to read."""
    return replace(batch, experience=batch.experience | more)


def one_choice(action: Specs) -> int:
    """The number of choices of the only action; refuse anything else."""
    spec = next(iter(action.values()))
    if len(action) == 1 and spec.kind == "categorical" and spec.shape == ():
        return spec.sizes[0]
    told = ", ".join(f"{name} ({s.kind} of shape {s.shape})" for name, s in action.items())
    raise UserError(
        f"The agent takes one Discrete action, but the environment has {told}; use ppo, or sac or td3 for "
        "continuous actions."
    )
