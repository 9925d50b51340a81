"""The base class of agents' settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from ludus.core.spec import Specs


class Plan(NamedTuple):
    """How often an agent updates and how much it stores; used for memory estimates and to choose engines."""

    rollout: int = 0  # steps of each environment per rollout; 0: no rollouts
    rollout_copies: int = 1  # copies of a rollout's observations in memory during learning
    rollout_floats: int = 0  # additional float32 copies, of normalized observations
    replay: int = 0  # transitions in the replay buffer
    optimizer_steps: float = 0.0  # per environment step
    batch: int = 0  # transitions per optimizer step
    fixed_shapes: bool = True  # whether all batches have the same shape, so that an update can be compiled once


class RunOutline(NamedTuple):
    """What an agent's defaults may depend on."""

    nb_step: int
    environments: int
    recurrent: bool  # whether a network may be recurrent
    images: bool  # whether an observation is an image; False until the environment exists
    one_discrete: bool  # whether the action is a single Discrete; True until the environment exists


class UnusedSetting(NamedTuple):
    """Settings that have no effect, depending on the value of another setting."""

    names: str  # separated by spaces
    depends_on: str
    is_unused: Callable[[Any], Any]  # called with the value of ``depends_on``
    reason: str  # {} stands for that value


@dataclass(frozen=True)
class AgentConfig:
    """Settings of an agent; subclasses are frozen dataclasses with a default and a comment per field."""

    NETWORK_DEFAULTS: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # defaults of network.* for this agent
    UNUSED: ClassVar[tuple[UnusedSetting, ...]] = ()
    ONLY_OFFLINE: ClassVar[bool] = False  # trained without acting: the container is offline
    UNUSED_OFFLINE: ClassVar[tuple[str, ...]] = ()  # settings that do nothing in the container offline
    PREFERS_OFFLINE: ClassVar[bool] = False  # the container is offline where data.path is given and no container

    def validate(self) -> None:
        """Raise a UserError for invalid values."""

    def locate(self, find_run: Callable[[str], str]) -> Self:
        """Return the settings with the runs that they name replaced by their folders, so that a resume finds them."""
        return self

    def check_run_length(self, nb_step: int, rows: int) -> None:
        """Raise a UserError if ``nb_step`` steps end before the first update."""

    def plan(self, rows: int) -> Plan:
        """Return the plan for ``rows`` environments."""
        return Plan()

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Yield every setting that has no effect, with the reason."""
        for names, depends_on, is_unused, reason in self.UNUSED:
            if is_unused(value := getattr(self, depends_on)):
                yield from ((name, reason.format(value)) for name in names.split())
