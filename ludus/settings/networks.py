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
        specs = _specs(kind, observation, action, settings.agent, shared)
        if shared and settings.network.shared in ("sources", "body"):
            separate = _specs(kind, observation, action, settings.agent, False)
            replaced = {name: spec for name, spec in separate.items() if name not in specs}
            if replaced:
                specs = {k: spec if k in separate else _with_branches(spec, replaced) for k, spec in specs.items()}
    if unknown := [name for name in settings.per_network if name not in specs]:
        together = f" (network.shared is {settings.network.shared})" if shared else ""
        raise UserError(
            f"network.{unknown[0]} is set, but the networks of {settings.agent_name} are {', '.join(specs)}{together}."
            f"{did_you_mean(unknown[0], specs)}"
        )
    observations = list(ObsPreprocessor(network_inputs(observation)).shapes)
    _refuse_unused_heads(settings, specs)
    return {name: _plan(name, settings.network_for(name), spec, observations) for name, spec in specs.items()}


def _specs(kind: type[Agent], observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
    required = kind.requirements(observation, action, config, shared)
    return {name: NetworkSpec(*spec) for name, spec in required.items()}


def _with_branches(together: NetworkSpec, separate: dict[str, NetworkSpec]) -> NetworkSpec:
    """Return the spec of a partly shared network: each network that it replaces becomes a branch."""
    return together._replace(branches={name: tuple(spec.outputs) for name, spec in separate.items()})


def _refuse_unused_heads(settings: Settings[Any], specs: dict[str, NetworkSpec]) -> None:
    """Refuse a head of a rank that no output has, be it of all networks or of one."""
    tables = {"network": (settings.network, list(specs))}
    tables |= {f"network.{name}": (settings.network_for(name), [name]) for name in settings.per_network}
    for table, (config, names) in tables.items():
        outputs = {name: shape for network in names for name, shape in specs[network].outputs.items()}
        ranks = {max(1, len(shape)) for shape in outputs.values()}
        for rank, piece in enumerate(config.heads, 1):
            inherited = table != "network" and piece == settings.network.heads[rank - 1]
            if rank not in ranks and rank > 1 and piece != f"identity{rank}d" and not inherited:
                raise UserError(
                    f'{table}.head{rank}d is "{piece}", but no output has rank {rank}: the outputs are '
                    f"{', '.join(f'{name} {shape}' for name, shape in outputs.items())}; leave it out."
                )


def _plan(name: str, config: NetworkConfig, spec: NetworkSpec, observations: list[str]) -> PlannedNetwork:
    """Drop the observations that the network does not see; other inputs, such as a critic's action, stay."""
    for pattern in config.sees:
        if not NetworkConfig(sees=(pattern.removeprefix("!"),)).visible(observations):
            raise UserError(
                f'network.{name}.sees has "{pattern}", but the observations are {", ".join(observations)}.'
                f"{did_you_mean(pattern, observations)}"
            )
    visible = config.visible(observations)
    if not visible:
        given = f'is "{" ".join(config.sees)}", which leaves out every observation' if config.sees else "is empty"
        raise UserError(f"network.{name}.sees {given}, so the network would have no input; name some observations.")
    inputs = {key: shape for key, shape in spec.inputs.items() if key in visible or key not in observations}
    for setting, patterns in (("sources", [pattern for pattern, _ in config.own_sources]), ("share", config.share)):
        for pattern in patterns:
            found = NetworkConfig(sees=(pattern,)).visible(observations)
            if not found:
                raise UserError(
                    f'network.{setting} has "{pattern}", but the observations are {", ".join(observations)}.'
                    f"{did_you_mean(pattern, observations)}"
                )
            if setting == "share" and len(found) == 1:
                raise UserError(
                    f'network.share has "{pattern}", which matches only the observation {found[0]}; write a pattern '
                    "that matches several, such as camera/*."
                )
    return PlannedNetwork(
        config,
        spec._replace(
            inputs=inputs,
            masks={name: mask for name, mask in spec.masks.items() if name in inputs},
            categories={name: size for name, size in spec.categories.items() if name in inputs},
        ),
    )
