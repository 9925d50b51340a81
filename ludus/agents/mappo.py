"""MAPPO: PPO for several agents whose critic sees the state of the world (Yu et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ludus.agents.ppo import PPO, PPOConfig
from ludus.core.errors import UserError
from ludus.core.network import NetworkSpec
from ludus.core.spec import Specs
from ludus.environments.multiagent import STATE


@dataclass(frozen=True)
class IPPOConfig(PPOConfig):
    """IPPO: PPO for several agents, each of which is a row with the same policy (de Witt et al. 2020)."""


@dataclass(frozen=True)
class MAPPOConfig(PPOConfig):
    """Settings of MAPPO: those of PPO, with an actor that does not see the state."""

    NETWORK_DEFAULTS = MappingProxyType({"actor.sees": ("*", f"!{STATE}")})


class MAPPO(PPO):
    """PPO on the rows of all agents, where the critic sees an agent's observations and the state of the world."""

    Config: type[Any] = MAPPOConfig
    global_state = True

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for the networks of PPO; refuse a role without ``state``, where other roles have another agent."""
        if STATE not in observation:
            raise UserError(
                "mappo needs the state of the world, which is observed by default only if all roles are mappo; turn on "
                "env.global_state, or use ppo."
            )
        return super().requirements(observation, action, config, shared)
