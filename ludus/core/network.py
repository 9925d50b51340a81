"""The interfaces of networks and of the pieces of a ModularNetwork."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
NONE: Mapping[str, Any] = MappingProxyType({})


class NetworkSpec(NamedTuple):
    """A network that an agent requires."""

    inputs: Shapes
    outputs: Shapes
    concatenate: bool = False  # concatenate all vector inputs before the first layer, as Q(s, a) critics do
    members: int = 1  # size of an ensemble; if greater than 1, outputs are [T, B, members, …]
    streams: bool = False  # a separate hidden layer per output, as in dueling networks
    noisy: bool = False  # NoisyNet layers after the trunk
    masks: Mapping[str, str] = NONE  # a padded list among the inputs → its mask [T, B, S], a bool input
    categories: Mapping[str, int] = NONE  # an input of integers 0 to n − 1, to be embedded → n
    over: Mapping[str, str] = NONE  # an output [F, S] or [F, H, W] → the input whose entries or places it is about
    branches: Mapping[str, tuple[str, ...]] = NONE  # a name → outputs that share only a part of the network with others


class Network(nn.Module, ABC):
    """Maps observations ``[T, B, …]`` to outputs ``[T, B, …]``, both by name; T is 1 when acting.

    A custom network is constructed as ``MyNetwork(inputs, outputs)``, both ``{name: shape}``.
    """

    recurrent = False
    sees: tuple[str, ...] = ()  # the inputs that it was built for
    orthogonal = True  # whether layers that a policy adds to its own start with orthogonal weights

    @property
    def linear(self) -> bool:
        """Whether the outputs are linear in the observations: no hidden layer."""
        return False

    def initial_state(self, batch: int) -> HiddenState:
        """Return the hidden state of ``batch`` environments before their first observation."""
        return HiddenState()

    @abstractmethod
    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        """Return the outputs and the state after the last step; the state is zeroed where ``first`` ``[T, B]``."""


class SubModule(nn.Module, ABC):
    """A piece of a ModularNetwork, for inputs of rank ``dim``, features first.

    It is made as ``Class(input_shape, config, **arguments)``, where ``config`` are the settings of the network and the
    arguments come from a setting such as ``lstm(size=128, layers=2)``. One that uses a context is made as
    ``Class(input_shape, config, context_shape, **arguments)``.
    """

    dim: Literal[1, 2, 3, 4]
    recurrent = False
    keeps_entries = True  # if input and output are lists of equal length: whether their entries correspond
    network_settings: tuple[str, ...] = ()  # settings of the network that the class reads: hidden, activation, …

    def __init__(self, input_shape: Shape) -> None:
        super().__init__()
        self.input_shape = input_shape

    @classmethod
    def uses_context(cls, arguments: Mapping[str, Any]) -> bool:
        """Return whether, with these arguments, its input attends to a context: lists ``[F, S]`` beside the input.

        Then ``forward`` gets two more arguments: ``context`` ``[N, F, S]`` and its padding mask ``context_mask``
        ``[N, S]`` or None, both ``[T, B, …]`` if the piece is recurrent. Only a body can use a context.
        """
        return False

    @abstractmethod
    def output_shape(self, dim: int | None = None) -> Shape:
        """Return the output shape without batch dimensions, cast to rank ``dim`` if given."""

    def initial_state(self, batch: int) -> HiddenState:
        """Return the hidden state of ``batch`` environments; empty if not recurrent."""
        return HiddenState()

    def output_mask(self, mask: Tensor) -> Tensor | None:
        """Return the padding mask of the output ``[N, S']``, given that of the input ``[N, S]``; None: no padding."""
        return mask if len(self.output_shape()) == 2 else None

    @abstractmethod
    def forward(
        self, x: Tensor, state: HiddenState, first: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, HiddenState]:
        """Return output and state; ``x`` is ``[N, …]``, or ``[T, B, …]`` if recurrent, reset by ``first`` ``[T, B]``.

        ``mask`` ``[N, S]`` (``[T, B, S]`` if recurrent) is False for padding of a list.
        """
