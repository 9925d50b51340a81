"""Networks of the user's own: a ``Network``, or any torch module, tried on zeros before training."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError, did_you_mean
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, Shape, Shapes
from ludus.core.types import Tensors
from ludus.networks.critic import ACTION
from ludus.networks.init import initialize
from ludus.networks.modular import GAINS, module_key


class CustomNetwork(Network):
    """Any ``nn.Module`` whose forward takes observations by name, each as ``[N, …]`` with time and batch in one.

    It returns features ``[N, F]``, to which a linear layer per output is added, or a dict with every output. The name
    ``camera/left`` is the argument ``camera_left``; with one observation and one argument, names do not matter.
    """

    def __init__(self, module: nn.Module, inputs: Shapes, outputs: Shapes) -> None:
        super().__init__()
        self.module, self.outputs = module, outputs
        self._arguments = match_arguments(module, list(inputs))
        self.projections = nn.ModuleDict()
        result = self._dry_run(inputs)
        if isinstance(result, dict):
            check_outputs(result, outputs, (2,), type(module).__name__)
        else:
            self._add_projections(result)

    @property
    def reads(self) -> list[str]:
        """The observations that the module takes."""
        return list(self._arguments.values())

    def _dry_run(self, inputs: Shapes) -> Any:
        """Call the module on zeros, in evaluation mode so that no statistics of its own move."""
        device = next((p.device for p in self.module.parameters()), None)
        zeros = {name: torch.zeros(2, *shape, device=device) for name, shape in inputs.items()}
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                return self._call(zeros)
        except Exception as error:
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zeros.items())
            raise UserError(
                f"Network {type(self.module).__name__} fails on a batch of zeros ({shapes}) with "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            self.module.train(was_training)

    def _add_projections(self, features: Any) -> None:
        name = type(self.module).__name__
        if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != 2:
            found = (
                f"a tensor of shape {tuple(features.shape)}"
                if isinstance(features, Tensor)
                else type(features).__name__
            )
            raise UserError(
                f"Network {name} returned {found} for a batch of 2: let it return features [N, F], or a dict with the "
                f"outputs {', '.join(self.outputs)}."
            )
        for output, shape in self.outputs.items():
            if len(shape) > 1:
                raise UserError(
                    f'Network {name} returns features, but output "{output}" has shape {shape}: return a dict.'
                )
            layer = nn.Linear(features.shape[1], shape[0] if shape else 1, device=features.device)
            self.projections[module_key(output)] = initialize(layer, GAINS.get(output.split("/")[0], 1.0))

    def _call(self, observation: Tensors) -> Any:
        if "" in self._arguments:
            return self.module(observation[self._arguments[""]])
        return self.module(**{argument: observation[name] for argument, name in self._arguments.items()})

    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        result = self._call({name: observation[name].flatten(0, 1) for name in self._arguments.values()})
        if self.projections:
            result = {name: self.projections[module_key(name)](result) for name in self.outputs}
        outputs = {name: result[name].reshape(*first.shape, *shape) for name, shape in self.outputs.items()}
        return outputs, HiddenState()


def argument_name(observation: str) -> str:
    """The argument of a forward method that stands for an observation: ``camera/left`` → ``camera_left``."""
    name = re.sub(r"\W", "_", observation)
    return f"_{name}" if name[:1].isdigit() else name


def match_arguments(module: nn.Module, observations: list[str]) -> dict[str, str]:
    """Argument of the module's forward → observation; the argument ``""`` is the first by position."""
    parameters = inspect.signature(module.forward).parameters.values()
    known = {argument_name(name): name for name in observations}
    if len(known) < len(observations):
        raise UserError(f"Observations {', '.join(observations)} would share an argument of the network; rename one.")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return known
    named = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    required = [p.name for p in named if p.default is p.empty]
    if len(observations) == 1 and len(required) <= 1 and required != list(known):
        return {"": observations[0]}
    for argument in required:
        if argument not in known:
            raise UserError(
                f'The forward of network {type(module).__name__} has an argument "{argument}", but no observation has '
                f"that name.{did_you_mean(argument, known)} Arguments that it may have: {', '.join(known)}."
            )
    return {p.name: known[p.name] for p in named if p.name in known}


def check_outputs(result: Any, outputs: Shapes, leading: Shape, network: str) -> None:
    """Refuse, in one sentence, a dict that lacks an output or has it in a wrong shape."""
    if not isinstance(result, dict):
        raise UserError(f"Network {network} returns a {type(result).__name__}, but must return a dict of its outputs.")
    for name, shape in outputs.items():
        if name not in result:
            found = ", ".join(map(str, result)) or "nothing"
            raise UserError(f'Network {network} returns {found}, but not the output "{name}" of shape {shape}.')
        given = result[name]
        found = f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"as {type(given).__name__}"
        if not isinstance(given, Tensor) or tuple(given.shape) != (*leading, *shape):
            raise UserError(
                f'Network {network} returns "{name}" {found} for a batch of {leading}: as a tensor, it '
                f"needs to be {(*leading, *shape)}."
            )


def make_custom(made_by: Any, name: str, inputs: Shapes, outputs: Shapes) -> Network:
    """Make a user's ``Network``, or wrap any other torch module in a ``CustomNetwork``."""
    if not inspect.isclass(made_by) or not issubclass(made_by, nn.Module):
        raise UserError(f'Network "{name}" is no class of torch modules: derive it from torch.nn.Module.')
    if issubclass(made_by, Network):
        return _own_network(made_by, inputs, outputs)
    network = CustomNetwork(_own_module(made_by, inputs), inputs, outputs)
    if ACTION in inputs and ACTION not in network.reads:
        raise UserError(
            f"Network {made_by.__name__} does not read {ACTION}, so that as a critic it could not tell actions apart: "
            f"give its forward an argument {ACTION}=None, which is None for the actor."
        )
    return network


def _own_network(made_by: type[Network], inputs: Shapes, outputs: Shapes) -> Network:
    if _required(made_by) > 2:
        raise UserError(
            f"Network {made_by.__name__} is made as {made_by.__name__}(inputs, outputs): give other arguments defaults."
        )
    network: Network = _make(made_by, inputs, outputs)
    check_on_zeros(network, inputs, outputs, made_by.__name__)
    return network


def check_on_zeros(network: Network, inputs: Shapes, outputs: Shapes, name: str) -> None:
    """Run three steps of two rows of zeros, in evaluation mode so that no statistics change."""
    was_training = network.training
    zeros = {key: torch.zeros(3, 2, *shape) for key, shape in inputs.items()}
    try:
        with torch.no_grad():
            result = network.eval()(zeros, network.initial_state(2), torch.ones(3, 2, dtype=torch.bool))
    except Exception as error:
        raise UserError(
            f"Network {name} fails on steps of zeros with {type(error).__name__}: {error}; fix its forward."
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
            f"Network {made_by.__name__} cannot be made: {type(error).__name__}: {error}; fix its constructor."
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
