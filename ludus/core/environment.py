"""The interfaces of environments, and of managers that step many of them as one batch."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.spec import Specs
from ludus.core.step import EnvStep, Episode
from ludus.core.types import State, Tensors

# called with achieved and desired goals; returns rewards, and terminations if they depend on the goal
GoalReward = Callable[..., tuple[NDArray[Any], NDArray[Any] | None]]
DEFAULT_ROLE = "agent"  # the only role of single-agent environments


class TensorEnvironment(Protocol):
    """``num_envs`` environments of torch tensors ``[num_envs, …]`` on a device, for ``env.backend tensor``.

    Constructed as ``MyEnv(num_envs, **options)``. Observations and actions are one tensor each, or tensors by name if
    the space is a Dict. A row that ends is reset in the same step: the returned observation is the first of its next
    episode. An environment that also has ``state_dict`` and ``load_state_dict`` resumes exactly.
    """

    num_envs: int
    observation_space: Any  # the Gymnasium space of one row
    action_space: Any

    def reset(self, seed: int) -> Any:
        """Start new episodes in all rows; return their observations."""

    def step(self, actions: Any) -> tuple[Any, Tensor, Tensor, Tensor, Any]:
        """Step all rows; return observations, rewards, terminated, truncated and final observations.

        The final observations are the last ones of episodes that ended (other rows are ignored); None at every step
        if they are not available.
        """


class Role(NamedTuple):
    """What the agents of one role observe and do."""

    observation: Specs
    action: Specs
    agents: int = 1  # per environment; rows are ordered by environment


class RoleManager(ABC):
    """Steps environments with agents of one or more roles, each role with its own rows.

    A role with n agents has rows n·e to n·(e + 1) for environment e.
    """

    groups: list[slice]  # ranges of environments that can be stepped independently

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, Role]:
        """The roles by name."""

    @abstractmethod
    def reset_roles(self, seed: int) -> dict[str, EnvStep]:
        """Start a new episode in every environment."""

    @abstractmethod
    def send_roles(self, actions: dict[str, Tensors], group: int = 0) -> None:
        """Start a step of one group."""

    @abstractmethod
    def recv_roles(self, group: int = 0) -> dict[str, EnvStep]:
        """Wait for the step of one group and return it."""

    @abstractmethod
    def last_roles(self) -> dict[str, EnvStep]:
        """Return the last step of all environments."""

    @abstractmethod
    def count_real(self, steps: dict[str, EnvStep]) -> int | Tensor:
        """Return in how many environments a step was real; on a GPU as a tensor, without waiting for it."""


class EnvironmentManager(RoleManager):
    """Steps B single-agent environments as one batch.

    Most managers use next-step autoreset: the step after an episode's end is the reset, with ``first`` true and
    ``real`` false; its action is ignored. With same-step autoreset, ``first`` and ``real`` are both true at the end of
    an episode, and the last observations are ``EnvStep.final``, given at every step or at none. ``first`` and ``real``
    without ``terminated`` or ``truncated`` is an error.
    """

    name: str = "The environment"  # for messages
    batch: int
    observation: Specs
    action: Specs
    on_warning: Callable[[str], object] = staticmethod(warnings.warn)  # called with messages for the user
    backend: str = ""  # shown to the user
    full_reset: bool = False  # ``reset`` with a seed clears all state, so a manager can be used for several evaluations
    nb_calls: int = 0  # steps and resets of a group so far
    longest_call: float = 0.0  # seconds
    restored: str = ""  # after load_state_dict: "exactly", or why rows started new episodes

    @property
    def roles(self) -> Mapping[str, Role]:
        return {DEFAULT_ROLE: Role(self.observation, self.action)}

    def reset_roles(self, seed: int) -> dict[str, EnvStep]:
        return {DEFAULT_ROLE: self.reset(seed)}

    def send_roles(self, actions: dict[str, Tensors], group: int = 0) -> None:
        self.send(actions[DEFAULT_ROLE], group)

    def recv_roles(self, group: int = 0) -> dict[str, EnvStep]:
        return {DEFAULT_ROLE: self.recv(group)}

    def last_roles(self) -> dict[str, EnvStep]:
        return {DEFAULT_ROLE: self.last_step()}

    def count_real(self, steps: dict[str, EnvStep]) -> int | Tensor:
        real = steps[DEFAULT_ROLE].real
        return int(np.count_nonzero(real.numpy())) if real.is_cpu else real.sum()

    @abstractmethod
    def set_action_transform(self, action_transform: Mapping[str, str]) -> None:
        """Set how policy actions are mapped to the environment's: ``clip``, ``tanh``, ``unit`` or ``none`` by name."""

    @abstractmethod
    def reset(self, seed: int) -> EnvStep:
        """Start a new episode in every row."""

    @abstractmethod
    def send(self, actions: Tensors, group: int = 0) -> None:
        """Start a step of one group."""

    @abstractmethod
    def recv(self, group: int = 0) -> EnvStep:
        """Wait for the step of one group and return it."""

    def step(self, actions: Tensors) -> EnvStep:
        """Step group 0: all rows, unless there are several groups."""
        self.send(actions)
        return self.recv()

    @abstractmethod
    def last_step(self) -> EnvStep:
        """Return the last step of all rows."""

    @abstractmethod
    def episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call."""

    def goal_reward(self) -> GoalReward | None:
        """Return the environments' reward function for hindsight replay; None if they have none."""
        return None

    def current_call(self) -> tuple[int, ...] | None:
        """Return an identifier of the environment call in progress in this process, or None.

        Called by a watchdog thread. Environments in worker processes have deadlines instead.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Release everything; may be called twice."""

    @abstractmethod
    def state_dict(self) -> State:
        """Return counters, the last step, and a snapshot (or seed and actions) of each environment."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Restore the environments, in place of ``reset``.

        A row that cannot be restored starts its next episode: ``first`` without an ending before it.
        """
