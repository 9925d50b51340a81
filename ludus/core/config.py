"""The base of agents' settings, and what containers, checks and messages ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from ludus.core.spec import Specs


class Plan(NamedTuple):
    """What an agent with its settings does and keeps."""

    rollout: int = 0  # steps of each environment that are learned from at once; 0: none
    rollout_copies: int = 1  # how often the observations of a rollout are in memory while it is learned from
    rollout_floats: int = 0  # how often more in float32, of observations that are normalized
    replay: int = 0  # transitions that are kept in memory
    optimizer_steps: float = 0.0  # per environment step


class UnusedSetting(NamedTuple):
    """Settings that nothing reads while another one has such a value."""

    names: str
    by: str
    when: Callable[[Any], Any]  # of the value of ``by``: whether they do nothing
    why: str  # may name that value: {}


@dataclass(frozen=True)
class AgentConfig:
    """Settings of an agent: derive a frozen dataclass from it, with a default and a comment for each field."""

    NETWORK_DEFAULTS: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # defaults of network.* for this agent
    UNUSED: ClassVar[tuple[UnusedSetting, ...]] = ()

    def validate(self) -> None:
        """Refuse values that cannot train."""

    def check_run_length(self, nb_step: int, rows: int) -> None:
        """Refuse a new run of ``nb_step`` steps in which nothing would be learned."""

    def plan(self, rows: int) -> Plan:
        """What the agent does and keeps with ``rows`` environments."""
        return Plan()

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Every setting that would do nothing, with the reason."""
        for names, by, when, why in self.UNUSED:
            if when(value := getattr(self, by)):
                yield from ((name, why.format(value)) for name in names.split())
