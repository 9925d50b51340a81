"""Build networks from settings."""

from __future__ import annotations

from typing import Any

from ludus.core.errors import UserError
from ludus.core.imports import resolve
from ludus.core.network import Network, NetworkSpec, Shapes
from ludus.core.spec import Specs
from ludus.networks import NETWORKS
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork
from ludus.preprocess.observation import ObsPreprocessor


def network_spec(observation: Specs, outputs: Shapes) -> NetworkSpec:
    """Specify a network that gets all preprocessed observations."""
    ready = ObsPreprocessor(observation)
    return NetworkSpec(ready.shapes, outputs, masks=ready.masks, categories=ready.categories)


def build_network(config: NetworkConfig, spec: NetworkSpec) -> Network:
    """Build the network that ``spec`` requests, of the class that ``config.name`` names.

    A custom ``Network`` is made as ``Class(inputs, outputs)``; any other ``nn.Module`` as ``Class(inputs)`` if its
    constructor has a required argument, else as ``Class()`` (see CustomNetwork).
    """
    config.validate()
    network = _build_member(config, spec) if spec.members == 1 else _build_ensemble(config, spec)
    network.sees = tuple(spec.inputs)
    return network


def _build_ensemble(config: NetworkConfig, spec: NetworkSpec) -> Network:
    from ludus.networks.ensemble import make_ensemble

    return make_ensemble([_build_member(config, spec) for _ in range(spec.members)], spec.inputs)


def _build_member(config: NetworkConfig, spec: NetworkSpec) -> Network:
    cls: Any = resolve(config.name, NETWORKS, "network")
    if cls is not ModularNetwork:
        from ludus.networks.custom import make_custom

        if spec.noisy:
            raise UserError(
                f'The agent asks for noisy layers, which custom networks ("{config.name}") do not have: '
                'turn them off with --agent.no-noisy, or set network.name to "modular".'
            )
        if spec.branches:
            raise UserError(
                f'network.shared is "{config.shared}", but a custom network ("{config.name}") cannot be shared in '
                "part; set it to yes or no."
            )
        return make_custom(cls, config.name, spec)
    if spec.concatenate:
        from ludus.networks.critic import RecurrentCritic, concatenate_inputs, has_memory

        if has_memory(config, spec):
            return RecurrentCritic(spec, config)
        config = concatenate_inputs(config)
    network = ModularNetwork(spec, config)
    if custom := [piece for piece in config.resolved(spec.inputs, spec.outputs).pieces if ":" in piece]:
        from ludus.networks.custom import check_on_zeros

        check_on_zeros(network, spec, f"with {', '.join(custom)}")
    return network
