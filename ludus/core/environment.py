"""Environments and what steps many of them as one batch."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray
from torch import Tensor

from ludus.core.spec import Specs
from ludus.core.step import EnvStep, Episode
from ludus.core.types import State, Tensors

GoalReward = Callable[..., tuple[NDArray[Any], NDArray[Any] | None]]  # of goals reached and wanted: rewards, endings


DEFAULT_ROLE = "agent"  # the role where there is only one


class TensorEnvironment(Protocol):
    """``num_envs`` environments of torch tensors ``[num_envs, …]`` on a device, for ``env.backend tensor``.

    Made as ``MyEnv(num_envs, **options)``. Observations and actions are one tensor each, or tensors by name where the
    space is a Dict. A row that ends is reset in the same step: the observation begins its next episode, and ``final``
    has, at every step, the last observations of rows that ended (other rows may hold anything), or is None at every
    step where these are not known. One that also has ``state_dict`` and ``load_state_dict`` resumes exactly.
    """

    num_envs: int
    observation_space: Any  # the Gymnasium space of one row
    action_space: Any

    def reset(self, seed: int) -> Any:
        """Begin new episodes in all rows; return their observations."""

    def step(self, actions: Any) -> tuple[Any, Tensor, Tensor, Tensor, Any]:
        """Step all rows; return observations, rewards, terminated, truncated, and the final observations or None."""


class Role(NamedTuple):
    """A role that agents play in an environment."""

    observation: Specs
    action: Specs
    agents: int = 1  # in each environment; their rows are environment by environment


class RoleManager(ABC):
    """Steps environments in which agents of one or more roles act at once, each with rows of its own.

    ``groups`` are ranges of environments that step on their own. A role with n agents has the rows n·e to n·(e + 1) of
    environment e.
    """

    groups: list[slice]
    all_real: bool = False  # whether every step after the reset is real, so that steps are counted without looking

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, Role]:
        """What the agents of each role see and do."""

    @abstractmethod
    def reset_roles(self, seed: int) -> dict[str, EnvStep]:
        """Begin a new episode in every environment."""

    @abstractmethod
    def send_roles(self, actions: dict[str, Tensors], group: int = 0) -> None:
        """Start a step of one group."""

    @abstractmethod
    def recv_roles(self, group: int = 0) -> dict[str, EnvStep]:
        """Wait for the step of one group and return it."""

    @abstractmethod
    def last_roles(self) -> dict[str, EnvStep]:
        """The last step of all environments."""


class EnvironmentManager(RoleManager):
    """Steps B environments with one agent each as one batch; ``groups`` are row ranges that step on their own.

    Most reset a row at the step after its ending: the action of that step is ignored, ``first`` is true and ``real``
    false, so the observation after an ending is always the true successor. A manager that resets in the same step says
    ``first`` and ``real`` there and gives the last observations as ``EnvStep.final`` at every step, or at none. A row
    with both must have ended: ``terminated`` or ``truncated``.
    """

    batch: int
    observation: Specs
    action: Specs
    on_warning: Callable[[str], object] = staticmethod(warnings.warn)  # told what to warn of
    backend: str = ""  # what steps the environments, as a run shows it
    full_reset: bool = False  # whether a reset makes environments forget all, as native ones do
    nb_calls: int = 0  # steps and resets so far, each of a whole group
    longest_call: float = 0.0  # seconds of the longest of them
    restored: str = ""  # after load_state_dict: "exactly", or why rows began new episodes

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

    @abstractmethod
    def set_action_transform(self, action_transform: Mapping[str, str]) -> None:
        """Say how policy-space actions become the environment's: ``clip``, ``tanh``, ``unit`` or ``none`` by name."""

    @abstractmethod
    def reset(self, seed: int) -> EnvStep:
        """Begin a new episode in every row."""

    @abstractmethod
    def send(self, actions: Tensors, group: int = 0) -> None:
        """Start a step of one group."""

    @abstractmethod
    def recv(self, group: int = 0) -> EnvStep:
        """Wait for the step of one group and return it."""

    def step(self, actions: Tensors) -> EnvStep:
        """Step the first group (all rows, where there is one group)."""
        self.send(actions)
        return self.recv()

    @abstractmethod
    def last_step(self) -> EnvStep:
        """The last step of all rows."""

    @abstractmethod
    def episodes(self) -> list[Episode]:
        """The episodes that ended since the last call."""

    def goal_reward(self) -> GoalReward | None:
        """What tells rewards and endings of goals that were not set, for hindsight; None where nothing does."""
        return None

    def current_call(self) -> tuple[int, ...] | None:
        """What the environments in this process are doing now: changes as they go on; None where none is being called.

        May be asked by another thread. Environments in processes of their own have deadlines instead.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Release everything; may be called twice."""

    @abstractmethod
    def state_dict(self) -> State:
        """What a resume needs: counters, the last step, and each environment's snapshot or seed and actions."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Bring the environments back to where ``state_dict`` saw them; ``reset`` is not needed then.

        A row that cannot come back begins its next episode: ``first`` with no ending before it.
        """
