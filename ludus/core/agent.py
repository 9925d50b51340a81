"""The interface of agents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ludus.core.batch import Batch, Learned
from ludus.core.cache import CacheReader, ExperienceCache, UnrollWriter
from ludus.core.config import OF_OPTIMIZER, AgentConfig, RunOutline
from ludus.core.dataset import Dataset
from ludus.core.environment import GoalReward
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec, Shapes
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.schedule import Schedule
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep, Episode
from ludus.core.types import Tensors
from ludus.core.updater import Group, Updater


class Teacher(Protocol):
    """A trained policy that labels observations with its actions."""

    def initial_state(self, batch: int) -> HiddenState:
        """Return its hidden state before the first observation of ``batch`` environments."""

    def label(self, step: EnvStep, state: HiddenState) -> tuple[Tensors, HiddenState]:
        """Return its most likely actions ``[B, …]``, in the policy space of the student, and its next state."""


class Actor(nn.Module, ABC):
    """Acts in environments: the part of an agent that playing and evaluating need."""

    recurrent = False  # whether a network has a hidden state

    @property
    @abstractmethod
    def action_transform(self) -> Mapping[str, str]:
        """How the manager maps this agent's actions to the environment's: clip, tanh, unit or none, by action name."""

    @abstractmethod
    def initial_state(self, batch: int) -> HiddenState:
        """Return the hidden state of ``batch`` environments before their first observation."""

    @abstractmethod
    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Return the source of random numbers for acting; a row draws the same numbers whichever process it is in."""

    @abstractmethod
    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Choose actions without recording gradients; greedy if ``noise`` is None, else exploring.

        The networks are in evaluation mode. ``self.training`` is False only during evaluation or in a loaded policy.
        """

    def value(self, step: EnvStep, state: HiddenState) -> Tensor | Tensors:
        """Return the expected discounted return ``[B]`` from each observation, in units of the environment's reward.

        Where agents of a world have values of their own, return them by agent.
        """
        raise UserError(f"{type(self).__name__} has no value function.")

    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Return the parameters ``[B, …]`` of the policy's distribution by action name."""
        raise UserError(f"{type(self).__name__} has no action distribution.")

    def track_critic_state(self) -> None:
        """Also advance a recurrent critic's hidden state while acting, as ``value`` needs."""
        return

    def use_numpy(self) -> bool:
        """Switch acting to numpy where this is supported and faster; return whether it was done."""
        return False


class Agent(Actor):
    """Acts and computes losses; owns its networks.

    Constructed as ``MyAgent(observation, action, config, networks, batch)``: ``networks`` are those that
    ``requirements`` asked for, ``batch`` is the number of environments to learn from.
    """

    network_names: tuple[str, ...] = ()  # all networks that ``requirements`` may ask for, as in network.<name>.*
    Config: type[AgentConfig]  # the settings: a frozen dataclass with a comment per field
    generator: torch.Generator | None = None  # random numbers of learning; the container seeds it
    corrects_old_unrolls = False  # whether it can learn from unrolls of policies that are some updates old
    learns_from_single_unrolls = False  # whether each unroll of a worker is a batch, whatever the settings
    unroll_steps = 0  # several roles: steps of an unroll, for agents that can choose; the container sets it
    needs_teacher = False  # whether a ``teacher`` must be set before acting in training
    teacher_run = ""  # the run whose policy is the ``teacher``
    teacher: Teacher | None = None
    needs_goal_reward = False  # hindsight replay: ``goal_reward`` must be set before ``make_cache``
    goal_reward: GoalReward | None = None  # the environments' reward function
    uses_dataset = False  # whether it can learn from recorded episodes (data.path)
    needs_dataset = False  # whether it cannot learn without them
    mixes_dataset = False  # whether, if it acts too, each batch has the share data.share of recorded steps
    learns_offline = False  # whether it can learn from them alone, without acting (container offline)
    dataset: Dataset | None = None  # recorded episodes; the container sets it before ``make_cache``
    dataset_share = 0.5  # data.share, or 1 without acting; the container sets it before ``make_cache``
    # several agents: "shared": each row is one agent, and all have this policy; "joint": each row is a world, whose
    # observations and actions are named as in environments/multiagent.py
    layout: Literal["shared", "joint"] = "shared"
    global_state = False  # several agents: whether it observes ``state``, that of the whole world
    uses_agent_rewards = False  # several agents: whether it learns from ``reward/<agent>`` in the joint layout
    _schedules: Mapping[str, Schedule] = MappingProxyType({})  # settings that are schedules
    _linear_rate, _first_rate = False, 0.0  # learning_rate_schedule is linear; rate of the first parameter group

    @property
    def config(self) -> Any:
        """The settings; those that are schedules have their current values, see also ``tensor_config``."""
        return self._current

    @config.setter
    def config(self, config: Any) -> None:
        self._given = self._current = config
        self._schedules = {name: x for name, x in vars(config).items() if isinstance(x, Schedule)}
        self._linear_rate = vars(config).get("learning_rate_schedule") == "linear"
        for name in self._schedules:
            self.register_buffer(_buffer(name), torch.zeros(()), persistent=False)
        self._set_scheduled(0.0)

    @property
    def given_gamma(self) -> float:
        """``agent.gamma`` as it was given: a number, or a schedule, which caches follow themselves."""
        gamma: float = self._given.gamma
        return gamma

    @property
    def is_scheduled(self) -> bool:
        """Whether a setting is a schedule."""
        return bool(self._schedules)

    def _set_scheduled(self, progress: float) -> dict[str, float]:
        values = {name: schedule.at(progress) for name, schedule in self._schedules.items()}
        if values:
            self._current = replace(self._given, **values)
            for name, value in values.items():
                self.get_buffer(_buffer(name)).fill_(value)
        return values

    def read_scheduled(self) -> None:
        """Set the values of ``config`` that are schedules from the buffers, after these were loaded."""
        values = {name: float(self.get_buffer(_buffer(name))) for name in self._schedules}
        self._current = replace(self._given, **values)

    def scheduled_tensor(self, setting: str) -> Tensor:
        """Return the buffer with the current value of a setting that is a schedule."""
        return self.get_buffer(_buffer(setting))

    def given_config(self) -> AbstractContextManager[None]:
        """Within the context, ``config`` has the schedules themselves."""
        return self._with_config(self._given)

    def tensor_config(self) -> AbstractContextManager[None]:
        """Within the context, settings that are schedules are tensors: buffers of this module with their values.

        So it is in a loss that is being compiled, as they change later. ``if config.value_clip`` on one of them cannot
        be compiled: look at the settings that the constructor gets instead.
        """
        buffers = {name: getattr(self, _buffer(name)) for name in self._schedules}
        return self._with_config(replace(self._given, **buffers))

    @contextmanager
    def _with_config(self, config: Any) -> Iterator[None]:
        before, self._current = self._current, config
        try:
            yield
        finally:
            self._current = before

    @classmethod
    @abstractmethod
    def requirements(
        cls, observation: Specs, action: Specs, config: Any, shared: bool
    ) -> Mapping[str, NetworkSpec | tuple[Shapes, Shapes]]:
        """Return the networks to build, by name; with ``shared``, actor and critic have one trunk."""

    @classmethod
    def adapt_defaults(cls, config: Any, run: RunOutline) -> Mapping[str, Any]:
        """Return defaults that suit this run; they apply to settings that the user did not give.

        It is called when the settings are read and again, with the same ``config``, when the observations are known.
        """
        return {}

    def final_value(self, final: Tensors, state: HiddenState) -> Tensor | None:
        """Return V ``[B]`` of the last observations of episodes that were reset in the same step.

        Recurrent critics need it because ``state``, the hidden state before the reset, is known only while acting.
        None: the learner computes the value from ``Batch.final``.
        """
        return None

    def check_trainable(self) -> None:
        """Raise a UserError if the settings cannot train these networks; not called when a policy is loaded."""
        return

    @abstractmethod
    def make_cache(self, rows: Rows) -> ExperienceCache:
        """Return the cache that this agent learns from."""

    def make_unroll(self, rows: Rows, memory: Tensors | None = None) -> UnrollWriter:
        """Return the cache that a worker fills and submits to a learner.

        It writes to ``memory``, the tensors of an ``Unroll`` by name, or allocates its own.
        """
        raise UserError(f"{type(self).__name__} cannot learn from workers' unrolls; use vtrace, appo or acer.")

    def acting_state(self) -> Tensors:
        """Return all tensors that acting depends on, by name, without copying them.

        Scheduled values are not among them: a worker calls ``schedule`` with the learner's progress.
        """
        return {name: x for named in (self.named_parameters(), self.named_buffers()) for name, x in named}

    @torch.no_grad()
    def load_acting_state(self, state: Tensors) -> None:
        """Copy the ``acting_state`` of the same agent in another process."""
        own = self.acting_state()
        torch._foreach_copy_([own[name] for name in state], list(state.values()))

    @abstractmethod
    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return losses and detached metrics by name; a pure function with static shapes, so it can be compiled."""

    def loss_coefficients(self) -> Mapping[str, float]:
        """Return the weight of each loss, from the settings ``<name>_coef``; losses without one have weight 1.

        The weights are tensors while a loss with scheduled weights is compiled.
        """
        settings = vars(self.config).items()
        return {name.removesuffix("_coef"): value for name, value in settings if name.endswith("_coef")}

    def parameter_groups(self) -> dict[str, Group]:
        """Return the trainable parameters by optimizer group; by default one group, ``all``."""
        return {"all": self.make_group(self.parameters())}

    def make_group(self, parameters: Iterable[nn.Parameter], learning_rate: float = 0.0) -> Group:
        """Return a group with the optimizer settings of the config, without frozen parameters.

        ``learning_rate`` overrides its rate if not 0.
        """
        settings = vars(self.config)
        names = {"optimizer_eps": "eps", "adam_beta1": "beta1"}  # in Group, where they are called otherwise
        given = (*OF_OPTIMIZER, "optimizer", *names)
        options = {names.get(name, name): settings[name] for name in given if name in settings}
        trainable = tuple(p for p in parameters if p.requires_grad)
        return Group(trainable, learning_rate or self.config.learning_rate, **options)

    def observe(self, cache: CacheReader, updater: Updater) -> None:
        """Update running statistics with what was written to the cache since the last call, before it is read."""
        return

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Learn from a batch; by default one optimizer step on all of it.

        ``updater.step`` computes the loss with the networks in training mode.
        """
        return Learned(updater.step(self.compute_loss, batch, "all"))

    def large_reward_advice(self) -> str:
        """Return what to change if large rewards made training diverge; empty if the agent normalizes them."""
        if (normalizes := vars(self.config).get("normalize_reward")) is None:
            return "scale the rewards down in the environment"
        return "" if normalizes else "turn on agent.normalize_reward"

    def episode_warning(self, episodes: list[Episode]) -> str:
        """Return a warning for the user if the finished episodes give cause for one, else an empty string."""
        return ""

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Set scheduled values from the progress of the run (0 to 1); return those to log.

        The updater sets learning rates that are schedules. A ``learning_rate`` among the values that are returned is
        that of the first parameter group, and scales the others by the same factor.
        """
        values = self._set_scheduled(progress)
        values = {name: value for name, value in values.items() if not name.endswith("learning_rate")}
        if self._linear_rate:
            self._first_rate = self._first_rate or next(iter(self.parameter_groups().values())).learning_rate
            values["learning_rate"] = self._first_rate * max(1 - progress, 0.0)
        return values


def _buffer(setting: str) -> str:
    """Return the name of the buffer with the current value of a setting."""
    return f"scheduled_{setting}"
