"""Convolutions along a sequence."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from torch import Tensor, nn

from ludus.core.arguments import Size, Sizes
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape, zero_padding
from ludus.networks.config import Activation, NetworkConfig
from ludus.networks.init import initialize
from ludus.ops.activations import ACTIVATIONS


class Conv1D(SubModule):
    """Convolutions along a sequence, each with the activation: ``[F, S]`` in, ``[last of channels, S]`` out.

    The ends and the padding of a shorter sequence count as zero.
    """

    dim = 2
    network_settings = ("activation",)

    def __init__(
        self,
        input_shape: Shape,
        config: NetworkConfig,
        *,
        channels: Sizes = (32, 32),
        kernel: Size = 3,
        activation: Activation | None = None,
    ) -> None:
        super().__init__(input_shape)
        if kernel % 2 == 0:
            raise UserError(f"kernel is {kernel}; it must be odd, so that the length is kept.")
        sizes = [input_shape[0], *channels]
        self.layers = nn.ModuleList(
            initialize(nn.Conv1d(n, m, kernel, padding=kernel // 2), sqrt(2), config.orthogonal)
            for n, m in pairwise(sizes)
        )
        self.activation, self._channels = activation or config.activation, sizes[-1]

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self._channels, self.input_shape[1]), dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        activate = ACTIVATIONS[self.activation]
        x = zero_padding(x, mask)
        for layer in self.layers:
            x = zero_padding(activate(layer(x)), mask)
        return x, state
