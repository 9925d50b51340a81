"""A multi-layer perceptron over a flattened matrix."""

from __future__ import annotations

from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.networks.cast import zero_padding
from ludus.networks.net1d.mlp import MLP


class FlatMLP(MLP):
    """An MLP over the flattened ``[F, S]``, for stacked vectors, boards and tables; padding of a list is zero."""

    dim = 2

    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        return super().forward(zero_padding(x, mask).flatten(1), state, first)
