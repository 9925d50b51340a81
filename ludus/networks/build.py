"""From settings to a network."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ludus.core.errors import UserError
from ludus.core.names import resolve
from ludus.core.network import Network, Shapes
from ludus.networks import NETWORKS
from ludus.networks.config import NetworkConfig
from ludus.networks.custom import CustomNetwork, check_outputs
from ludus.networks.modular import ModularNetwork


def build_network(config: NetworkConfig, inputs: Shapes, outputs: Shapes) -> Network:
    """Build the network that ``config.name`` means.

    A ``Network`` of the user's is made as ``Class(inputs, outputs)``; any other ``nn.Module`` as ``Class(inputs)`` if
    its constructor has one required argument, as ``Class()`` if it has none (see CustomNetwork).
    """
    config.validate()
    made_by: Any = resolve(config.name, NETWORKS, "network")
    if made_by is ModularNetwork:
        return ModularNetwork(inputs, outputs, config)
    if not inspect.isclass(made_by) or not issubclass(made_by, nn.Module):
        raise UserError(f'Network "{config.name}" is no class of torch modules: derive it from torch.nn.Module.')
    if issubclass(made_by, Network):
        return _own_network(made_by, inputs, outputs)
    return CustomNetwork(_own_module(made_by, inputs), inputs, outputs)


def _own_network(made_by: type[Network], inputs: Shapes, outputs: Shapes) -> Network:
    """Make a user's Network and try it on one step of two rows of zeros."""
    if _required(made_by) > 2:
        raise UserError(
            f"Network {made_by.__name__} is made as {made_by.__name__}(inputs, outputs): give other arguments defaults."
        )
    network: Network = made_by(inputs, outputs)
    was_training = network.training
    zeros = {name: torch.zeros(1, 2, *shape) for name, shape in inputs.items()}
    with torch.no_grad():
        result, _ = network.eval()(zeros, network.initial_state(2), torch.ones(1, 2, dtype=torch.bool))
    check_outputs(result, outputs, (1, 2), made_by.__name__)
    network.train(was_training)
    return network


def _own_module(made_by: type[nn.Module], inputs: Shapes) -> nn.Module:
    required = _required(made_by)
    if required > 1:
        raise UserError(
            f"Network {made_by.__name__} needs {required} arguments to be made: give it none, or one for the "
            "observations' shapes {name: shape}, and defaults to all others."
        )
    return made_by(inputs) if required else made_by()


def _required(made_by: type[nn.Module]) -> int:
    """How many arguments a constructor needs."""
    parameters = inspect.signature(made_by).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
