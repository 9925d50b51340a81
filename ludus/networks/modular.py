"""A network assembled from named pieces: sources, body, heads, projections."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, Shape, Shapes
from ludus.core.types import Tensors
from ludus.networks.cast import cast, cast_shape, join_shapes
from ludus.networks.config import NetworkConfig
from ludus.networks.identity import Identity
from ludus.networks.net1d.mlp import MLP
from ludus.networks.pieces import make_piece, piece_class
from ludus.networks.projection import make_projection

NO_STATE = HiddenState()  # of feed-forward pieces


class _Slot(NamedTuple):
    """A piece and its name in ``pieces``, which also prefixes its hidden state; None for an identity."""

    name: str
    piece: Any
    recurrent: bool

    def run(self, x: Tensor, state: HiddenState, first: Tensor, new_state: HiddenState) -> Tensor:
        """Run the piece on ``x`` ``[T·B, …]`` and add its hidden state to ``new_state``."""
        if self.piece is None:
            return x
        if not self.recurrent:
            y: Tensor = self.piece(x, NO_STATE, first)[0]
            return y
        y, new = self.piece(x.view(*first.shape, *x.shape[1:]), state.select(self.name), first)
        new_state.update(new.with_prefix(self.name))
        return y.flatten(0, 1)


class ModularNetwork(Network):
    """Each observation through a source of its rank, all joined through the body, one head per output rank.

    ``pieces`` holds the sources as ``source/<observation>``, the ``body`` and the heads as ``head<rank>d``, without
    identities. ``projections`` holds the layers from a head to each output; with ``streams`` these have a hidden layer.
    """

    def __init__(
        self, inputs: Shapes, outputs: Shapes, config: NetworkConfig, streams: bool = False, noisy: bool = False
    ) -> None:
        super().__init__()
        config = config.resolved(len(inputs))
        self.inputs, self.outputs = inputs, outputs
        self.pieces, self.projections = nn.ModuleDict(), nn.ModuleDict()
        # forward uses these lists, because looking a module up by name costs as much as a small operation
        self._slots: list[_Slot] = []
        self._sources: list[tuple[str, _Slot]] = []
        self._heads: list[tuple[int, _Slot]] = []
        self._projections: list[tuple[str, nn.Module, int, Shape]] = []

        self._body_rank = piece_class(config.body, "network.body").dim
        sources: Shapes = {}
        for name, shape in inputs.items():
            rank = len(shape)
            if rank not in (1, 2, 3, 4):
                raise UserError(f'Observation "{name}" has shape {shape}: a modular network takes ranks 1 to 4.')
            place, setting = f"source/{module_key(name)}", f"network.net{rank}d"
            slot, source = self._add(place, config.source_for(shape), setting, shape, config, rank)
            self._sources.append((name, slot))
            sources[name] = cast_shape(source, self._body_rank)
        joined = join_shapes(sources, config.body)
        self._space = joined[1:]
        self._expand = any(shape[1:] != self._space for shape in sources.values())
        self._body, body = self._add("body", config.body, "network.body", joined, config)

        heads: dict[int, Shape] = {}
        ranks = sorted({max(1, len(shape)) for shape in outputs.values()})
        for rank, piece in enumerate(config.heads, 1):
            if rank not in ranks and piece != f"identity{rank}d":
                raise UserError(
                    f'network.head{rank}d is "{piece}", but no output has rank {rank}: the outputs are '
                    f"{', '.join(f'{name} {shape}' for name, shape in outputs.items())}; leave it out."
                )
        for rank in ranks:
            piece, setting = config.heads[rank - 1], f"network.head{rank}d"
            slot, head = self._add(f"head{rank}d", piece, setting, cast_shape(body, rank), config, rank)
            self._heads.append((rank, slot))
            heads[rank] = cast_shape(head, rank)
        for name, shape in outputs.items():
            rank = max(1, len(shape))
            projection = make_projection(name, shape, heads[rank], config, streams, noisy)
            self.projections[module_key(name)] = projection
            self._projections.append((name, projection, rank, shape))

        self.recurrent = any(slot.recurrent for slot in self._slots)

    def _add(
        self, slot_name: str, piece: str, setting: str, shape: Shape, config: NetworkConfig, rank: int | None = None
    ) -> tuple[_Slot, Shape]:
        """Make a piece, register it unless it is an identity, and return it with its output shape."""
        made = make_piece(piece, setting, shape, config, rank)
        if isinstance(made, Identity):
            return _Slot(slot_name, None, recurrent=False), made.output_shape()
        self.pieces[slot_name] = made
        self._slots.append(_Slot(slot_name, made, made.recurrent))
        return self._slots[-1], made.output_shape()

    def initial_state(self, batch: int) -> HiddenState:
        state = HiddenState()
        for slot in self._slots:
            state.update(slot.piece.initial_state(batch).with_prefix(slot.name))
        return state

    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        new_state = HiddenState()
        parts = [
            cast(slot.run(observation[name].flatten(0, 1), state, first, new_state), self._body_rank)
            for name, slot in self._sources
        ]
        if self._expand:
            parts = [x.expand(*x.shape[:2], *self._space) for x in parts]
        x = self._body.run(torch.cat(parts, 1) if len(parts) > 1 else parts[0], state, first, new_state)
        heads = {rank: cast(slot.run(cast(x, rank), state, first, new_state), rank) for rank, slot in self._heads}
        outputs = {
            name: projection(heads[rank]).reshape(*first.shape, *shape)
            for name, projection, rank, shape in self._projections
        }
        return outputs, new_state

    @property
    def linear(self) -> bool:
        """Return whether there is no hidden layer between the observations and the outputs."""
        empty = all(isinstance(slot.piece, MLP) and not slot.piece.layers for slot in self._slots)
        last = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        return empty and all(type(layer) in last for layer in self.projections.values())

    def plain_mlp(self) -> MLP | None:
        """Return the only piece if it is an MLP over all concatenated vectors, followed by linear projections."""
        if type(self) is not ModularNetwork or len(self._slots) != 1:
            return None
        (slot,) = self._slots
        if len(self.inputs) > 1 and slot.name.startswith("source/"):
            return None
        vectors = all(len(shape) == 1 for shape in self.inputs.values())
        vectors = vectors and all(len(shape) <= 1 for shape in self.outputs.values())
        linear = all(type(layer) is nn.Linear for layer in self.projections.values())
        return slot.piece if type(slot.piece) is MLP and vectors and linear else None


def module_key(name: str) -> str:
    """Return the key of a name in a ModuleDict, where PyTorch forbids dots."""
    return name.replace(".", "·")
