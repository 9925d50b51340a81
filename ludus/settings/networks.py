"""Find out which networks an agent needs, with the settings and the observations of each."""

from __future__ import annotations

from inspect import isabstract
from typing import Any, NamedTuple

import torch

from ludus.agents import AGENTS
from ludus.core.agent import Agent
from ludus.core.errors import UserError, did_you_mean
from ludus.core.imports import resolve
from ludus.core.network import NetworkSpec
from ludus.core.spec import Specs, network_inputs
from ludus.networks.config import NetworkConfig
from ludus.preprocess.observation import ObsPreprocessor
from ludus.settings.settings import Settings


class PlannedNetwork(NamedTuple):
    """Settings and spec of a network that is not built yet."""

    config: NetworkConfig
    spec: NetworkSpec


def plan_networks(
    settings: Settings[Any], observation: Specs, action: Specs, shared: bool
) -> dict[str, PlannedNetwork]:
    """Return the networks that the agent requires, by name; none for a class that is not an agent."""
    kind = resolve(settings.agent_name, AGENTS, "agent")
    if not (isinstance(kind, type) and issubclass(kind, Agent)) or isabstract(kind):
        return {}
    with torch.random.fork_rng(devices=[]):  # requirements() may initialize modules
        specs = kind.requirements(observation, action, settings.agent, shared)
    if unknown := [name for name in settings.per_network if name not in specs]:
        together = " (network.shared is yes)" if shared else ""
        raise UserError(
            f"network.{unknown[0]} is set, but the networks of {settings.agent_name} are {', '.join(specs)}{together}."
            f"{did_you_mean(unknown[0], specs)}"
        )
    observations = list(ObsPreprocessor(network_inputs(observation)).shapes)
    return {
        name: _plan(name, settings.network_for(name), NetworkSpec(*spec), observations) for name, spec in specs.items()
    }


def _plan(name: str, config: NetworkConfig, spec: NetworkSpec, observations: list[str]) -> PlannedNetwork:
    """Drop the observations that the network does not see; other inputs, such as a critic's action, stay."""
    for pattern in config.sees:
        if not any(NetworkConfig(sees=(pattern,)).visible(observations)):
            raise UserError(
                f'network.{name}.sees has "{pattern}", but the observations are {", ".join(observations)}.'
                f"{did_you_mean(pattern, observations)}"
            )
    if not config.sees:
        raise UserError(f"network.{name}.sees is empty, so the network would have no input; name some observations.")
    visible = config.visible(observations)
    inputs = {key: shape for key, shape in spec.inputs.items() if key in visible or key not in observations}
    return PlannedNetwork(config, spec._replace(inputs=inputs))
