"""From settings to a network."""

from __future__ import annotations

from typing import Any

from ludus.core.errors import UserError
from ludus.core.names import resolve
from ludus.core.network import Network, NetworkSpec
from ludus.networks import NETWORKS
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork


def build_network(config: NetworkConfig, need: NetworkSpec) -> Network:
    """Build what ``need`` asks for, of the kind that ``config.name`` means.

    A ``Network`` of the user's is made as ``Class(inputs, outputs)``; any other ``nn.Module`` as ``Class(inputs)`` if
    its constructor has one required argument, as ``Class()`` if it has none (see CustomNetwork).
    """
    config.validate()
    if need.members == 1:
        return _build_one(config, need)
    from ludus.networks.ensemble import make_ensemble

    return make_ensemble([_build_one(config, need) for _ in range(need.members)])


def _build_one(config: NetworkConfig, need: NetworkSpec) -> Network:
    made_by: Any = resolve(config.name, NETWORKS, "network")
    if made_by is not ModularNetwork:
        from ludus.networks.own import make_own

        if need.noisy:
            raise UserError(
                f'The agent asks for noisy layers, which a network of your own ("{config.name}") is not given: '
                'turn them off with --agent.no-noisy, or set network.name to "modular".'
            )
        return make_own(made_by, config.name, need.inputs, need.outputs)
    if need.joined:
        from ludus.networks.critic import TAKEN, MemoryFirst, joined, remembers  # most runs do without

        if TAKEN in need.inputs and remembers(config, need):
            return MemoryFirst(need, config)
        config = joined(config)
    network = ModularNetwork(need.inputs, need.outputs, config, need.streams, need.noisy)
    config = config.settled(len(need.inputs))
    names = (config.net1d, config.net2d, config.net3d, config.net4d, config.body, config.head)
    if own := [name for name in names if ":" in name]:
        from ludus.networks.own import rehearse

        rehearse(network, need.inputs, need.outputs, f"with {', '.join(own)}")
    return network
