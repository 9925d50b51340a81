"""Custom networks: a user's ``Network`` or any torch module, checked on zeros before training."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError, did_you_mean
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec, Shape, Shapes
from ludus.core.types import Tensors
from ludus.networks.critic import ACTION
from ludus.networks.init import initialize
from ludus.networks.projection import output_gain
from ludus.networks.slots import module_key


class CustomNetwork(Network):
    """Wraps an ``nn.Module`` with a forward that takes observations by name, each ``[N, …]`` with N = T·B.

    The module returns features ``[N, F]``, to which a linear layer per output is added, or a dict with every output.
    The observation ``camera/left`` is passed as ``camera_left``; with one observation and one argument, the argument
    may have any name. The padding mask of a list ``units`` is passed to an argument ``units_mask``, if there is one.
    """

    def __init__(self, module: nn.Module, spec: NetworkSpec) -> None:
        super().__init__()
        self.module, self.outputs = module, spec.outputs
        self.arguments = match_arguments(module, list(spec.inputs), list(spec.masks.values()))
        self.projections = nn.ModuleDict()
        result = self._dry_run(spec)
        if isinstance(result, dict):
            check_outputs(result, spec.outputs, (2,), type(module).__name__)
        else:
            self._add_projections(result)

    def _dry_run(self, spec: NetworkSpec) -> Any:
        """Call the module on zeros, in evaluation mode so that batch statistics do not change."""
        zeros = example_inputs(spec, (2,), next((p.device for p in self.module.parameters()), None))
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
            is_tensor = isinstance(features, Tensor)
            returned = f"a tensor of shape {tuple(features.shape)}" if is_tensor else type(features).__name__
            raise UserError(
                f"Network {name} returned {returned} for a batch of 2: return features [N, F], or a dict with the "
                f"outputs {', '.join(self.outputs)}."
            )
        for output, shape in self.outputs.items():
            if len(shape) > 1:
                raise UserError(
                    f'Network {name} returns features, but output "{output}" has shape {shape}: return a dict.'
                )
            layer = nn.Linear(features.shape[1], shape[0] if shape else 1, device=features.device)
            self.projections[module_key(output)] = initialize(layer, output_gain(output))

    def _call(self, observation: Tensors) -> Any:
        positional = [observation[name] for argument, name in self.arguments.items() if not argument]
        named = {argument: observation[name] for argument, name in self.arguments.items() if argument}
        return self.module(*positional, **named)

    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        result = self._call({name: observation[name].flatten(0, 1) for name in self.arguments.values()})
        if self.projections:
            result = {name: self.projections[module_key(name)](result) for name in self.outputs}
        outputs = {name: result[name].reshape(*first.shape, *shape) for name, shape in self.outputs.items()}
        return outputs, HiddenState()


def argument_name(observation: str) -> str:
    """Return the forward argument for an observation: ``camera/left`` → ``camera_left``."""
    name = re.sub(r"\W", "_", observation)
    return f"_{name}" if name[:1].isdigit() else name


def match_arguments(module: nn.Module, observations: list[str], masks: list[str]) -> dict[str, str]:
    """Return the observation for each argument of the module's forward; the key ``""`` means the first positional.

    Masks are passed only to arguments that name them.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    known = {argument_name(name): name for name in observations}
    if len(known) < len(observations):
        raise UserError(f"Two of the observations {', '.join(observations)} map to the same argument; rename one.")
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_argument = {argument_name(name): name for name in masks}
    named_masks = {p.name: by_argument[p.name] for p in named if p.name in by_argument}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return known | named_masks
    required = [p.name for p in named if p.default is p.empty and p.name not in named_masks]
    if len(observations) == 1 and len(required) <= 1 and required != list(known):
        return {"": observations[0]} | named_masks
    for argument in required:
        if argument not in known:
            raise UserError(
                f'The forward of network {type(module).__name__} has an argument "{argument}", but no observation has '
                f"that name.{did_you_mean(argument, known)} Possible arguments: {', '.join(known)}."
            )
    return {p.name: known[p.name] for p in named if p.name in known} | named_masks


def check_outputs(result: Any, outputs: Shapes, leading: Shape, network: str) -> None:
    """Raise a UserError unless ``result`` is a dict with all outputs in their shapes."""
    if not isinstance(result, dict):
        raise UserError(f"Network {network} returns a {type(result).__name__}, but must return a dict of outputs.")
    for name, shape in outputs.items():
        if name not in result:
            returned = ", ".join(map(str, result)) or "nothing"
            raise UserError(f'Network {network} returns {returned}, but not the output "{name}" of shape {shape}.')
        x = result[name]
        if not isinstance(x, Tensor) or tuple(x.shape) != (*leading, *shape):
            returned = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"as {type(x).__name__}"
            raise UserError(
                f'Network {network} returns "{name}" {returned} for a batch of {leading}; it must be a tensor of shape '
                f"{(*leading, *shape)}."
            )


def example_inputs(spec: NetworkSpec, leading: Shape, device: torch.device | None = None) -> Tensors:
    """Return zeros for every input: integers for categories, and masks without padding."""
    zeros = {
        name: torch.zeros(*leading, *shape, dtype=torch.int64 if name in spec.categories else None, device=device)
        for name, shape in spec.inputs.items()
    }
    sizes = {mask: spec.inputs[name][0 if name in spec.categories else 1] for name, mask in spec.masks.items()}
    return zeros | {mask: torch.ones(*leading, size, dtype=torch.bool, device=device) for mask, size in sizes.items()}


def make_custom(cls: Any, name: str, spec: NetworkSpec) -> Network:
    """Make a user's ``Network`` as ``cls(inputs, outputs)``, or wrap any other torch module in a ``CustomNetwork``."""
    inputs = spec.inputs
    if not inspect.isclass(cls) or not issubclass(cls, nn.Module):
        raise UserError(f'Network "{name}" is not a class of torch modules: derive it from torch.nn.Module.')
    parameters = inspect.signature(cls).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    if issubclass(cls, Network):
        if required > 2:
            raise UserError(
                f"Network {cls.__name__} is made as {cls.__name__}(inputs, outputs): give all other arguments defaults."
            )
        network: Network = _instantiate(cls, inputs, spec.outputs)
        check_on_zeros(network, spec, cls.__name__)
        return network
    if required > 1:
        raise UserError(
            f"The constructor of network {cls.__name__} needs {required} arguments: it may have one for the "
            "observations' shapes {name: shape}, and all others need defaults."
        )
    custom = CustomNetwork(_instantiate(cls, inputs) if required else _instantiate(cls), spec)
    if ACTION in inputs and ACTION not in custom.arguments.values():
        raise UserError(
            f"Network {cls.__name__} does not read {ACTION}, so as a critic it would not depend on the action: give "
            f"its forward an argument {ACTION}=None, which is None for the actor."
        )
    return custom


def _instantiate(cls: type[Any], *arguments: Any) -> Any:
    try:
        return cls(*arguments)
    except Exception as error:
        raise UserError(
            f"Network {cls.__name__} cannot be made: {type(error).__name__}: {error}; fix its constructor."
        ) from error


def check_on_zeros(network: Network, spec: NetworkSpec, name: str) -> None:
    """Check the outputs on three steps of two rows of zeros, in evaluation mode so that statistics do not change."""
    was_training = network.training
    zeros = example_inputs(spec, (3, 2))
    try:
        with torch.no_grad():
            result = network.eval()(zeros, network.initial_state(2), torch.ones(3, 2, dtype=torch.bool))
    except Exception as error:
        raise UserError(
            f"Network {name} fails on steps of zeros with {type(error).__name__}: {error}; fix its forward."
        ) from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise UserError(
            f"Network {name} must return two values from forward: the outputs by name and the hidden state."
        )
    check_outputs(result[0], spec.outputs, (3, 2), name)
    network.train(was_training)
