"""The last layers of an output where they are more than one linear layer: a hidden layer of its own, noise, or both."""

from __future__ import annotations

from math import sqrt

from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.network import Shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize
from ludus.networks.net1d.mlp import ACTIVATIONS
from ludus.networks.noisy import NoisyLinear


class Stream(nn.Module):
    """A hidden layer of one output alone, as wide as what comes in, and the layer that makes the output."""

    def __init__(self, hidden: nn.Module, last: nn.Module, activation: str) -> None:
        super().__init__()
        self.hidden, self.last, self.activation = hidden, last, activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(ACTIVATIONS[self.activation](self.hidden(x)))
        return y


def make_last_layers(
    name: str, shape: Shape, head: Shape, config: NetworkConfig, gain: float, streams: bool, noisy: bool
) -> nn.Module:
    """What turns the features of a head into one output, with a hidden layer (``streams``), noisy, or both."""
    if len(shape) > 1:
        raise UserError(
            f'Output "{name}" has shape {shape}, but noisy layers and a hidden layer of its own are for vectors alone.'
        )
    size = shape[0] if shape else 1
    last = _linear(head[0], size, gain, config, noisy)
    if not streams:
        return last
    return Stream(_linear(head[0], head[0], sqrt(2), config, noisy), last, config.activation)


def _linear(inputs: int, outputs: int, gain: float, config: NetworkConfig, noisy: bool) -> nn.Module:
    if noisy:
        return NoisyLinear(inputs, outputs)  # which has first weights of its own
    return initialize(nn.Linear(inputs, outputs), gain, config.orthogonal)
