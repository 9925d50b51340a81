"""Making a user's network, and trying it before training: whatever fails there is one sentence."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ludus.core.errors import UserError
from ludus.core.network import Network, Shapes
from ludus.networks.critic import TAKEN
from ludus.networks.custom import CustomNetwork, check_outputs


def make_own(made_by: Any, name: str, inputs: Shapes, outputs: Shapes) -> Network:
    """Make a Network of the user's, or wrap any other torch module."""
    if not inspect.isclass(made_by) or not issubclass(made_by, nn.Module):
        raise UserError(f'Network "{name}" is no class of torch modules: derive it from torch.nn.Module.')
    if issubclass(made_by, Network):
        return _own_network(made_by, inputs, outputs)
    network = CustomNetwork(_own_module(made_by, inputs), inputs, outputs)
    if TAKEN in inputs and TAKEN not in network.reads:
        raise UserError(
            f"Network {made_by.__name__} does not read {TAKEN}, so that as a critic it could not tell actions apart: "
            f"give its forward an argument {TAKEN}=None, which is None for the actor."
        )
    return network


def _own_network(made_by: type[Network], inputs: Shapes, outputs: Shapes) -> Network:
    if _required(made_by) > 2:
        raise UserError(
            f"Network {made_by.__name__} is made as {made_by.__name__}(inputs, outputs): give other arguments defaults."
        )
    network: Network = _make(made_by, inputs, outputs)
    rehearse(network, inputs, outputs, made_by.__name__)
    return network


def rehearse(network: Network, inputs: Shapes, outputs: Shapes, name: str) -> None:
    """Run three steps of two rows of zeros, in evaluation mode so that no statistics move."""
    was_training = network.training
    zeros = {key: torch.zeros(3, 2, *shape) for key, shape in inputs.items()}
    try:
        with torch.no_grad():
            result = network.eval()(zeros, network.initial_state(2), torch.ones(3, 2, dtype=torch.bool))
    except Exception as error:
        raise UserError(
            f"Network {name} fails on steps of zeros with {type(error).__name__}: {error}; mend its forward."
        ) from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise UserError(f"Network {name} must return two things from forward: the outputs by name and the state.")
    check_outputs(result[0], outputs, (3, 2), name)
    network.train(was_training)


def _make(made_by: type[Any], *arguments: Any) -> Any:
    try:
        return made_by(*arguments)
    except Exception as error:
        raise UserError(
            f"Network {made_by.__name__} cannot be made: {type(error).__name__}: {error}; mend its constructor."
        ) from error


def _own_module(made_by: type[nn.Module], inputs: Shapes) -> nn.Module:
    required = _required(made_by)
    if required > 1:
        raise UserError(
            f"Network {made_by.__name__} needs {required} arguments to be made: give it none, or one for the "
            "observations' shapes {name: shape}, and defaults to all others."
        )
    module: nn.Module = _make(made_by, inputs) if required else _make(made_by)
    return module


def _required(made_by: type[nn.Module]) -> int:
    """How many arguments a constructor needs."""
    parameters = inspect.signature(made_by).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
