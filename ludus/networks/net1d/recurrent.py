"""What recurrent pieces over vectors share: their size, their layers and the names of their states."""

from __future__ import annotations

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig


class RecurrentPiece(SubModule):
    """Layers of ``size`` units, each with ``states`` ``[B, size]`` that each episode resets.

    The states of the first layer are called ``h``, or ``h`` and ``c``, those of the second ``h2`` and ``c2``.
    """

    dim = 1
    recurrent = True
    network_settings = ("lstm_size",)
    states: tuple[str, ...] = ("h",)

    def __init__(self, input_shape: Shape, config: NetworkConfig, size: int | None, layers: int = 1) -> None:
        super().__init__(input_shape)
        self.size = size or config.lstm_size
        self.input_sizes = [input_shape[0], *[self.size] * (layers - 1)]  # by layer
        suffixes = ["", *map(str, range(2, layers + 1))]
        self.names = [tuple(state + suffix for state in self.states) for suffix in suffixes]  # of states, by layer

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((self.size,), dim)

    def initial_state(self, batch: int) -> HiddenState:
        zeros = next(self.parameters()).new_zeros
        return HiddenState({name: zeros(batch, self.size) for names in self.names for name in names})
