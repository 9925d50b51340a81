"""From settings to a network."""

from __future__ import annotations

from typing import Any

from ludus.core.errors import UserError
from ludus.core.imports import resolve
from ludus.core.network import Network, NetworkSpec
from ludus.networks import NETWORKS
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork


def build_network(config: NetworkConfig, spec: NetworkSpec) -> Network:
    """Build what ``spec`` asks for, of the kind that ``config.name`` means.

    A ``Network`` of the user's is made as ``Class(inputs, outputs)``; any other ``nn.Module`` as ``Class(inputs)`` if
    its constructor has one required argument, as ``Class()`` if it has none (see CustomNetwork).
    """
    config.validate()
    if spec.members == 1:
        return _build_one(config, spec)
    from ludus.networks.ensemble import make_ensemble

    return make_ensemble([_build_one(config, spec) for _ in range(spec.members)])


def _build_one(config: NetworkConfig, spec: NetworkSpec) -> Network:
    made_by: Any = resolve(config.name, NETWORKS, "network")
    if made_by is not ModularNetwork:
        from ludus.networks.custom import make_custom

        if spec.noisy:
            raise UserError(
                f'The agent asks for noisy layers, which a network of your own ("{config.name}") is not given: '
                'turn them off with --agent.no-noisy, or set network.name to "modular".'
            )
        return make_custom(made_by, config.name, spec.inputs, spec.outputs)
    if spec.concatenate:
        from ludus.networks.critic import (  # most runs do without
            ACTION,
            RecurrentCritic,
            concatenate_inputs,
            is_recurrent,
        )

        if ACTION in spec.inputs and is_recurrent(config, spec):
            return RecurrentCritic(spec, config)
        config = concatenate_inputs(config)
    network = ModularNetwork(spec.inputs, spec.outputs, config, spec.streams, spec.noisy)
    config = config.resolved(len(spec.inputs))
    if own := [name for name in config.piece_names if ":" in name]:
        from ludus.networks.custom import check_on_zeros

        check_on_zeros(network, spec.inputs, spec.outputs, f"with {', '.join(own)}")
    return network
