"""What a modular network runs: sources, heads and projections, each in its place."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape
from ludus.core.types import Tensors
from ludus.networks.cast import Features, Join, zero_padding

NO_STATE = HiddenState()  # of feed-forward pieces


class Recurrence(NamedTuple):
    """What recurrent pieces need and give in a forward pass."""

    state: HiddenState
    first: Tensor  # [T, B]
    new_state: HiddenState


class Slot(NamedTuple):
    """A piece and its place, which prefixes its hidden state; the piece is None for an identity."""

    name: str
    piece: Any

    def run(self, features: Features, recurrence: Recurrence, context: Features | None = None) -> Features:
        """Run the piece on a tensor ``[T·B, …]`` with its padding mask; ``context``: the lists that it attends to."""
        if self.piece is None:
            return features
        x, mask = features
        state, first, new_state = recurrence
        recurrent = self.piece.recurrent
        if mask is None and context is None and not recurrent:
            return self.piece(x, NO_STATE, first)[0], None
        given = [x, mask, *(context or ())]
        while given[-1] is None:  # a piece that needs no mask may leave it out of its arguments
            given.pop()
        if recurrent:
            given = [None if tensor is None else tensor.view(*first.shape, *tensor.shape[1:]) for tensor in given]
        y, new = self.piece(given[0], state.select(self.name), first, *given[1:])
        new_state.update(new.with_prefix(self.name))
        return y.flatten(0, 1) if recurrent else y, None if mask is None else self.piece.output_mask(mask)


class Source(NamedTuple):
    """The source of one observation."""

    observation: str
    slot: Slot
    mask: str  # the observation that masks its padding; "" if it is not a padded list
    embedding: nn.Module | None  # of categories
    shape: Shape  # of the output

    def run(self, observation: Tensors, recurrence: Recurrence) -> Features:
        x = observation[self.observation].flatten(0, 1)
        mask = observation[self.mask].flatten(0, 1) if self.mask else None
        if self.embedding is not None:
            x = zero_padding(self.embedding(x).movedim(-1, 1), mask)
        if mask is not None and x.dim() != 3:  # padded images: only lists have a mask further on
            x, mask = zero_padding(x, mask), None
        return self.slot.run((x, mask), recurrence)


class Head(NamedTuple):
    """A head for outputs of one rank and size."""

    slot: Slot
    rank: int  # of its output
    join: Join  # of its input: the body's output, or sources with a vector


class Projection(NamedTuple):
    """The last layer of an output."""

    output: str
    layer: nn.Module
    features: int  # the number of its input
    shape: Shape


class Branch(NamedTuple):
    """What follows the joined sources: a body, heads and projections.

    Inputs of heads and projections are numbered: the sources, the body's output, the outputs of the heads.
    """

    body: Slot | None  # None: an identity, or the body of the branch before
    heads: list[Head]
    projections: list[Projection]


def module_key(name: str) -> str:
    """Return the key of a name in a ModuleDict, where PyTorch forbids dots."""
    return name.replace(".", "·")
