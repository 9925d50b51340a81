"""Noisy linear layers as a piece."""

from __future__ import annotations

from torch import Tensor

from ludus.core.arguments import Size
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import Activation, NetworkConfig
from ludus.networks.noisy import NoisyLinear
from ludus.ops.activations import ACTIVATIONS


class NoisyLayer(SubModule):
    """A linear layer with learned parameter noise (NoisyNet, Fortunato et al. 2018), followed by the activation.

    Only agents with noisy layers redraw the noise (--agent.noisy); a ModularNetwork refuses it in others.
    """

    dim = 1
    network_settings = ("activation",)

    def __init__(
        self, input_shape: Shape, config: NetworkConfig, *, size: Size = 64, activation: Activation | None = None
    ) -> None:
        super().__init__(input_shape)
        self.layer = NoisyLinear(input_shape[0], size)
        self.activation = activation or config.activation

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.layer.out_features,), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        return ACTIVATIONS[self.activation](self.layer(x)), state
