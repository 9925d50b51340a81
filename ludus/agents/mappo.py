"""MAPPO: PPO for several agents whose critic sees the state of the world (Yu et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ludus.agents.ppo import PPO, PPOConfig


@dataclass(frozen=True)
class IPPOConfig(PPOConfig):
    """IPPO: PPO for several agents, each of which is a row with the same policy (de Witt et al. 2020)."""


@dataclass(frozen=True)
class MAPPOConfig(PPOConfig):
    """Settings of MAPPO: those of PPO, with an actor that does not see the state."""

    NETWORK_DEFAULTS = MappingProxyType({"actor.sees": ("*", "!state")})


class MAPPO(PPO):
    """PPO on the rows of all agents, where the critic sees an agent's observations and the state of the world."""

    Config: type[Any] = MAPPOConfig
    global_state = True
