"""The piece that does nothing, for every rank."""

from __future__ import annotations

from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig


class Identity(SubModule):
    """Passes its input on; a ModularNetwork leaves it out of the forward pass, so it costs nothing."""

    def __init__(self, input_shape: Shape, config: NetworkConfig) -> None:
        super().__init__(input_shape)

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape(self.input_shape, dim)

    def forward(self, x: Tensor, state: HiddenState, first: Tensor) -> tuple[Tensor, HiddenState]:
        return x, state


class Identity1D(Identity):
    """Pass vectors on."""

    dim = 1


class Identity2D(Identity):
    """Pass sequences on."""

    dim = 2


class Identity3D(Identity):
    """Pass images on."""

    dim = 3


class Identity4D(Identity):
    """Pass volumes on."""

    dim = 4
