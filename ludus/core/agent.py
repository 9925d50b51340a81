"""The interface of agents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.batch import Batch, Learned
from ludus.core.cache import CacheWriter, ExperienceCache
from ludus.core.config import AgentConfig
from ludus.core.environment import GoalReward
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec, Shapes
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep, Episode
from ludus.core.types import Tensors
from ludus.core.updater import Group, Updater


class Agent(nn.Module, ABC):
    """Acts and computes losses; owns its networks.

    Made as ``MyAgent(observation, action, config, networks, batch)``, where ``networks`` answers ``requirements`` and
    ``batch`` is the number of environments that it will learn from.
    """

    network_names: tuple[str, ...] = ()  # of all networks that it may ask for: each may have settings of its own
    Config: type[AgentConfig]  # the settings: a frozen dataclass with a comment per field
    config: Any
    goal_reward: GoalReward | None = None  # set before make_cache if needs_goal_reward: the environments' own
    needs_goal_reward = False

    @classmethod
    @abstractmethod
    def requirements(
        cls, observation: Specs, action: Specs, config: Any, shared: bool
    ) -> Mapping[str, NetworkSpec | tuple[Shapes, Shapes]]:
        """What to build: network name → input shapes, output shapes, and more; ``shared``: one trunk for all."""

    @classmethod
    def adapt_defaults(cls, config: Any, nb_step: int, environments: int, recurrent: bool) -> Mapping[str, Any]:
        """Return values to use in place of the defaults in a run of this length; settings that the user gave stay."""
        return {}

    @property
    @abstractmethod
    def action_transform(self) -> Mapping[str, str]:
        """How the environment side turns this agent's actions into the environment's, by action name."""

    @abstractmethod
    def initial_state(self, batch: int) -> HiddenState:
        """The hidden state of ``batch`` environments before their first observation."""

    @abstractmethod
    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """The random numbers of acting for these rows: the same for a row in whatever process it is."""

    @abstractmethod
    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Choose actions, without a graph: greedy without ``noise``, exploring with it.

        The networks are in evaluation mode; ``self.training`` is False only in an evaluation or a loaded policy.
        """

    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """The expected discounted return from each observation ``[B]``, in the environment's rewards."""
        raise UserError(f"{type(self).__name__} has no value function: its class defines no method value.")

    def final_value(self, final: Tensors, state: HiddenState) -> Tensor | None:
        """V of the last observations of episodes that were reset in the same step ``[B]``, for the learner.

        ``state`` is the hidden state before the reset, which only acting knows. None: the value does not depend on it,
        and learning computes it from ``Batch.final``.
        """
        return None

    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """The parameters of the policy's distribution by action name, ``[B, …]`` each."""
        raise UserError(f"{type(self).__name__} has no distribution of actions: its class defines no such method.")

    def track_critic_state(self) -> None:
        """From now on advance the critic's memory, if it has one, while acting too: ``value`` depends on it."""
        return

    def check_trainable(self) -> None:
        """Refuse, before training, settings that do not fit the networks; a trained policy may be loaded with them."""
        return

    @abstractmethod
    def make_cache(self, rows: Rows) -> ExperienceCache:
        """The cache that this agent learns from, for these rows."""

    def make_unroll(self, rows: Rows, memory: Tensors | None = None) -> CacheWriter:
        """What a worker fills with these rows and submits to a learner: in ``memory``, or in memory of its own.

        ``memory`` has the tensors of an ``Unroll`` by name, as another unroll of the same agent and environments has.
        """
        raise UserError(f"{type(self).__name__} does not learn from unrolls of workers; use acer_vtrace, ppo or a2c.")

    @abstractmethod
    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return losses and metrics by name: pure, of static shapes, no graph in the metrics."""

    def loss_coefficients(self) -> Mapping[str, float]:
        """The weight of each loss: the setting ``<name>_coef`` (1 where there is none)."""
        fields = vars(self.config) if hasattr(self.config, "__dict__") else {}
        return {name.removesuffix("_coef"): value for name, value in fields.items() if name.endswith("_coef")}

    def parameter_groups(self) -> dict[str, Group]:
        """The parameters that learn, by the group in which they are stepped together; by default all in one."""
        return {"all": self.make_group(p for p in self.parameters() if p.requires_grad)}

    def make_group(self, parameters: Iterable[nn.Parameter], learning_rate: float = 0.0) -> Group:
        """A group that is stepped as the settings say; ``learning_rate``: one of its own, if it is not 0."""
        settings = vars(self.config) if hasattr(self.config, "__dict__") else {}
        names = {"max_grad_norm": "max_grad_norm", "weight_decay": "weight_decay", "optimizer": "optimizer"}
        names["eps"] = "optimizer_eps"
        found = {field: settings[name] for field, name in names.items() if name in settings}
        return Group(tuple(parameters), learning_rate or self.config.learning_rate, **found)

    def use_numpy(self) -> bool:
        """Switch acting to numpy, where the agent can do that and it pays; return whether it did."""
        return False

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Learn from a batch; by default one step on the whole of it.

        ``updater.step`` puts the networks in training mode while it computes the loss.
        """
        return Learned(updater.step(self.compute_loss, batch, "all"))

    def episode_warning(self, episodes: list[Episode]) -> str:
        """Look at episodes that ended; return a warning for the user if there is cause for one, else nothing."""
        return ""

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Set what follows the share of the run that is done (0 to 1); return the values to log."""
        return {}
