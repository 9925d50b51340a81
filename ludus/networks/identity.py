"""Identity pieces, one per rank."""

from __future__ import annotations

from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig


class Identity(SubModule):
    """Returns its input; a ModularNetwork skips it in the forward pass."""

    def __init__(self, input_shape: Shape, config: NetworkConfig) -> None:
        super().__init__(input_shape)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape(self.input_shape, dim)

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        return x, state


class Identity1D(Identity):
    """The identity on vectors."""

    dim = 1


class Identity2D(Identity):
    """The identity on sequences."""

    dim = 2


class Identity3D(Identity):
    """The identity on images."""

    dim = 3


class Identity4D(Identity):
    """The identity on volumes."""

    dim = 4
