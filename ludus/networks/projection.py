"""Output layers of a ModularNetwork: linear or 1×1 convolution, noisy, or with a hidden layer per output."""

from __future__ import annotations

from math import sqrt
from typing import Any

from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.network import Shape
from ludus.networks.config import NetworkConfig
from ludus.networks.init import initialize
from ludus.networks.noisy import NoisyLinear
from ludus.ops.activations import ACTIVATIONS

GAINS = {"policy": 0.01, "value": 1.0}  # initial gain by the first part of an output's name; 1 for all others
MAX_STREAM_WIDTH = 512  # as in Rainbow; a hidden layer as wide as a large input would need too much memory


class Stream(nn.Module):
    """A hidden layer and an output layer, as in dueling networks."""

    def __init__(self, hidden: nn.Module, last: nn.Module, activation: str) -> None:
        super().__init__()
        self.hidden, self.last, self.activation = hidden, last, activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(ACTIVATIONS[self.activation](self.hidden(x)))
        return y


def output_gain(name: str) -> float:
    """Return the initial gain of an output's last layer."""
    return GAINS.get(name.split("/")[0], 1.0)


def make_projection(
    name: str, shape: Shape, head: Shape, config: NetworkConfig, streams: bool, noisy: bool
) -> nn.Module:
    """Make the layers from the features of a head to one output.

    With ``streams`` the output gets a hidden layer, as wide as the features but at most ``MAX_STREAM_WIDTH``.
    """
    size, gain = shape[0] if shape else 1, output_gain(name)
    if streams or noisy:
        if len(shape) > 1:
            raise UserError(
                f'Output "{name}" has shape {shape}, but noisy layers and dueling streams work on vectors only.'
            )
        if not streams:
            return _linear(head[0], size, gain, config, noisy)
        width = min(head[0], MAX_STREAM_WIDTH)
        last = _linear(width, size, gain, config, noisy)
        return Stream(_linear(head[0], width, sqrt(2), config, noisy), last, config.activation)
    if shape[1:] != head[1:]:
        raise UserError(
            f'Output "{name}" of shape {shape} cannot be made from head{len(head)}d, which has shape {head}: choose a '
            "body and a head that keep the height and width."
        )
    if len(head) == 1:
        return _linear(head[0], size, gain, config, noisy=False)
    layer: Any = {2: nn.Conv1d, 3: nn.Conv2d, 4: nn.Conv3d}[len(head)](head[0], size, 1)
    convolution: nn.Module = initialize(layer, gain, config.orthogonal)
    return convolution


def _linear(inputs: int, outputs: int, gain: float, config: NetworkConfig, noisy: bool) -> nn.Module:
    if noisy:
        return NoisyLinear(inputs, outputs)  # initializes itself as in the paper
    return initialize(nn.Linear(inputs, outputs), gain, config.orthogonal)
