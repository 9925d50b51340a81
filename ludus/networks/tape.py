"""The backward pass of plain MLPs by hand: in tiny networks, the bookkeeping of autograd costs more than the maths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ludus.core.types import Tensors
from ludus.networks.modular import ModularNetwork

Slope = Callable[[Tensor, Tensor], Tensor]
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Slope]] = {  # in place, and back from what came out of it
    "tanh": (torch.tanh_, torch.ops.aten.tanh_backward.default),
    "relu": (torch.relu_, lambda gradient, y: torch.ops.aten.threshold_backward.default(gradient, y, 0)),
}


class _Linear:
    """A layer as views of its parameters and gradients."""

    def __init__(self, layer: Any) -> None:
        self.weight, self.bias = layer.weight.detach(), layer.bias.detach()
        self.turned = self.weight.t()
        self.weight_gradient, self.bias_gradient = layer.weight.grad, layer.bias.grad

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.turned)

    def add(self, gradient: Tensor, x: Tensor) -> None:
        """Add the parameters' gradient, given that of what came out for ``x``."""
        self.weight_gradient.addmm_(gradient.t(), x)
        self.bias_gradient.add_(gradient.sum(0))


class _Call(NamedTuple):
    plain: Plain
    inputs: list[Tensor]  # of each layer of the trunk, and of the projections
    outputs: Tensors


class Plain:
    """A network that is nothing but an MLP on one observation, with its two passes."""

    def __init__(self, network: ModularNetwork, tape: Tape) -> None:
        layers = network.plain_layers() or []
        self._tape, self._name = tape, next(iter(network.inputs))
        self._trunk = [(_Linear(layer), *ACTIVATIONS[activation]) for layer, activation in layers]
        self._outputs = [
            (name, _Linear(layer), shape)
            for (name, shape), layer in zip(network.outputs.items(), network.projections.values(), strict=True)
        ]

    def forward(self, observation: Tensors, leading: torch.Size) -> Tensors | None:
        """The outputs ``[T, B, …]`` as leaves; None where the tape does not record or cannot."""
        x = observation[self._name]
        if not self._tape.recording or x.requires_grad or not torch.is_grad_enabled():
            return None
        inputs = [x.reshape(-1, x.shape[-1])]
        for layer, activate_, _ in self._trunk:
            inputs.append(activate_(layer.forward(inputs[-1])))
        outputs = {
            name: layer.forward(inputs[-1]).view(*leading, *shape).requires_grad_()
            for name, layer, shape in self._outputs
        }
        self._tape.calls.append(_Call(self, inputs, outputs))
        return outputs

    def backward(self, inputs: list[Tensor], outputs: Tensors) -> None:
        """From the gradients of the outputs to those of the parameters, which are added to what is there."""
        total: Tensor | None = None
        for name, layer, _ in self._outputs:
            if (gradient := outputs[name].grad) is not None:
                gradient = gradient.reshape(len(inputs[-1]), -1)
                layer.add(gradient, inputs[-1])
                total = gradient @ layer.weight if total is None else total.addmm_(gradient, layer.weight)
        if total is None:
            return
        for depth in reversed(range(len(self._trunk))):
            layer, _, slope = self._trunk[depth]
            total = slope(total, inputs[depth + 1])
            layer.add(total, inputs[depth])
            if depth:
                total = total @ layer.weight


class Tape:
    """Runs the plain MLPs of an agent without a graph and takes their backward pass by hand.

    Inside ``with tape`` the outputs of such a network are leaves, so that autograd ends at them; ``backward`` goes on
    from their gradients and adds to those of the parameters, as autograd does. A network that is not plain, or whose
    observation needs a gradient, goes the usual way. ``complete``: all parameters belong to plain networks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.recording = False
        self.calls: list[_Call] = []
        networks = [network for network in module.modules() if isinstance(network, ModularNetwork)]
        plain = [network for network in networks if _is_plain(network)]
        for network in networks:
            network.plain = Plain(network, self) if network in plain else None
        covered = sum(p.numel() for network in plain for p in network.parameters())
        self.complete = covered == sum(p.numel() for p in module.parameters() if p.requires_grad)

    def __enter__(self) -> Self:
        self.recording = True
        self.calls.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self.recording = False

    @property
    def fed(self) -> bool:
        """Whether some output has a gradient: autograd, or a loss that does without it, has come to it."""
        return any(x.grad is not None for x in self.leaves())

    def leaves(self) -> list[Tensor]:
        """The outputs that autograd ends at."""
        return [x for call in self.calls for x in call.outputs.values()]

    def backward(self) -> None:
        """Take the backward pass of all calls, the last first, once their outputs have gradients."""
        while self.calls:
            plain, inputs, outputs = self.calls.pop()
            plain.backward(inputs, outputs)


def _is_plain(network: ModularNetwork) -> bool:
    layers = network.plain_layers()
    learns = all(p.is_cpu and p.grad is not None for p in network.parameters())
    return learns and layers is not None and all(activation in ACTIVATIONS for _, activation in layers)


def bare_mlp(network: nn.Module, output: str) -> Callable[[Tensor], Tensor] | None:
    """One output of a plain MLP as a function of its only observation, without modules; None if it is not plain."""
    layers = network.plain_layers() if isinstance(network, ModularNetwork) else None
    if layers is None or any(activation not in ACTIVATIONS for _, activation in layers):
        return None
    last: Any = network.projections[output]  # type: ignore[index]
    trunk = [(layer.weight, layer.bias, ACTIVATIONS[activation][0]) for layer, activation in layers]
    weight, bias = last.weight, last.bias  # parameters are the same objects for ever

    def forward(x: Tensor) -> Tensor:
        leading = x.shape[:-1]
        x = x.reshape(-1, x.shape[-1])
        for w, b, activate_ in trunk:
            x = activate_(torch.addmm(b, x, w.t()))
        return torch.addmm(bias, x, weight.t()).view(*leading, -1)

    return forward
