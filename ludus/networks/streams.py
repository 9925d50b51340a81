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

WIDEST = 512  # a hidden layer of an output's own, as Rainbow's: as wide as a large input, it would fill the memory


class Stream(nn.Module):
    """A hidden layer of one output alone, and the layer that makes the output."""

    def __init__(self, hidden: nn.Module, last: nn.Module, activation: str) -> None:
        super().__init__()
        self.hidden, self.last, self.activation = hidden, last, activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(ACTIVATIONS[self.activation](self.hidden(x)))
        return y


def make_last_layers(
    name: str, shape: Shape, head: Shape, config: NetworkConfig, gain: float, streams: bool, noisy: bool
) -> nn.Module:
    """What turns the features of a head into one output, with a hidden layer (``streams``), noisy, or both.

    The hidden layer is as wide as what comes in, and never wider than ``WIDEST``.
    """
    if len(shape) > 1:
        raise UserError(
            f'Output "{name}" has shape {shape}, but noisy layers and a hidden layer of its own are for vectors alone.'
        )
    size = shape[0] if shape else 1
    if not streams:
        return _linear(head[0], size, gain, config, noisy)
    width = min(head[0], WIDEST)
    last = _linear(width, size, gain, config, noisy)
    return Stream(_linear(head[0], width, sqrt(2), config, noisy), last, config.activation)


def _linear(inputs: int, outputs: int, gain: float, config: NetworkConfig, noisy: bool) -> nn.Module:
    if noisy:
        return NoisyLinear(inputs, outputs)  # which has first weights of its own
    return initialize(nn.Linear(inputs, outputs), gain, config.orthogonal)
