"""From settings to a network."""

from __future__ import annotations

from typing import Any

from ludus.core.names import resolve
from ludus.core.network import Network, Shapes
from ludus.networks import NETWORKS
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork


def build_network(config: NetworkConfig, inputs: Shapes, outputs: Shapes) -> Network:
    """Build the network that ``config.name`` means.

    A ``Network`` of the user's is made as ``Class(inputs, outputs)``; any other ``nn.Module`` as ``Class(inputs)`` if
    its constructor has one required argument, as ``Class()`` if it has none (see CustomNetwork).
    """
    config.validate()
    made_by: Any = resolve(config.name, NETWORKS, "network")
    if made_by is not ModularNetwork:
        from ludus.networks.own import make_own  # only runs with a network of their own load what it needs

        return make_own(made_by, config.name, inputs, outputs)
    network = ModularNetwork(inputs, outputs, config)
    names = (config.net1d, config.net2d, config.net3d, config.net4d, config.body, config.head)
    if own := [name for name in names if ":" in name]:
        from ludus.networks.own import rehearse

        rehearse(network, inputs, outputs, f"with {', '.join(own)}")
    return network
