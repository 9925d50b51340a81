"""Networks and their pieces: tensors in by name, tensors out by name, hidden state in and out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

from torch import Tensor, nn

from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


class NetworkSpec(NamedTuple):
    """A network that an agent asks for."""

    inputs: Shapes
    outputs: Shapes
    concatenate: bool = False  # concatenate all vector inputs before the first layer, as Q(s, a) critics do
    members: int = 1  # of an ensemble; where there are several, the outputs are [T, B, members, …]
    streams: bool = False  # each output has a hidden layer of its own
    noisy: bool = False  # layers after the trunk explore by themselves (NoisyNet)


class Network(nn.Module, ABC):
    """Maps observations to named outputs. Always sees ``[T, B, …]``; acting is T=1.

    A network of your own is a subclass made as ``MyNetwork(inputs, outputs)``, both ``{name: shape}``.
    """

    recurrent = False

    def initial_state(self, batch: int) -> HiddenState:
        """The hidden state of ``batch`` environments before their first observation."""
        return HiddenState()

    @abstractmethod
    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        """Return the outputs ``[T, B, …]`` and the state after the last step; rows with ``first`` start from zero."""


class SubModule(nn.Module, ABC):
    """A piece of a ModularNetwork: it takes tensors of rank ``dim``, features first."""

    dim: Literal[1, 2, 3, 4]
    recurrent = False

    def __init__(self, input_shape: Shape) -> None:
        super().__init__()
        self.input_shape = input_shape

    @abstractmethod
    def output_shape(self, dim: int | None = None) -> Shape:
        """The shape of one row of the output; with ``dim``, that shape cast to rank ``dim``."""

    def initial_state(self, batch: int) -> HiddenState:
        """The hidden state of ``batch`` environments; empty for feed-forward pieces."""
        return HiddenState()

    @abstractmethod
    def forward(self, x: Tensor, state: HiddenState, first: Tensor) -> tuple[Tensor, HiddenState]:
        """Feed-forward pieces see ``[N, …]``; recurrent ones ``[T, B, …]``, and reset by ``first`` ``[T, B]``."""
