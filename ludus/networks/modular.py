"""A network assembled from named pieces: sources, body, heads, projections."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec, Shape, Shapes
from ludus.core.types import Tensors
from ludus.networks.cast import Features, Join, cast_features, cast_shape, plan_join, zero_padding
from ludus.networks.config import NetworkConfig
from ludus.networks.identity import Identity
from ludus.networks.net1d.mlp import MLP
from ludus.networks.noisy import noisy_layers
from ludus.networks.pieces import make_piece, piece_class, uses_context
from ludus.networks.projection import make_projection

NO_STATE = HiddenState()  # of feed-forward pieces
KEEPING = {2: "entity_mlp", 3: "sc2le_encoder", 4: "identity4d"}  # sources that keep lists, maps and volumes


class Part(NamedTuple):
    """A part of a network for `ludus show network`: a source, body, head or projection."""

    name: str
    kind: str  # the piece as in the settings, or the class of a layer
    inputs: tuple[str, ...]  # the observations or parts that it gets
    input_shape: Shape
    output_shape: Shape
    module: nn.Module | None  # None for an identity


class _Recurrence(NamedTuple):
    """What recurrent pieces need and give in a forward pass."""

    state: HiddenState
    first: Tensor  # [T, B]
    new_state: HiddenState


class _Slot(NamedTuple):
    """A piece and its place, which prefixes its hidden state; the piece is None for an identity."""

    name: str
    piece: Any

    def run(self, features: Features, recurrence: _Recurrence, context: Features | None = None) -> Features:
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


class _Source(NamedTuple):
    """The source of one observation."""

    observation: str
    slot: _Slot
    mask: str  # the observation that masks its padding; "" if it is not a padded list
    embedding: nn.Module | None  # of categories
    shape: Shape  # of the output

    @property
    def output_mask(self) -> str:
        """The observation that masks the padding of its output; "" if that is not a padded list."""
        piece = self.slot.piece
        if not self.mask or len(self.shape) != 2 or (piece is not None and len(piece.input_shape) != 2):
            return ""
        pooled = piece is not None and piece.output_mask(torch.ones(1, piece.input_shape[1], dtype=torch.bool)) is None
        return "" if pooled else self.mask

    def run(self, observation: Tensors, recurrence: _Recurrence) -> Features:
        x = observation[self.observation].flatten(0, 1)
        mask = observation[self.mask].flatten(0, 1) if self.mask else None
        if self.embedding is not None:
            x = zero_padding(self.embedding(x).movedim(-1, 1), mask)
        if mask is not None and x.dim() != 3:  # padded images: only lists have a mask further on
            x, mask = zero_padding(x, mask), None
        return self.slot.run((x, mask), recurrence)


class _Head(NamedTuple):
    """A head for outputs of one rank and size."""

    slot: _Slot
    rank: int  # of its output
    join: Join  # of its input: the body's output, or sources with a vector


class _Projection(NamedTuple):
    """The last layer of an output."""

    output: str
    layer: nn.Module
    features: int  # the number of its input
    shape: Shape


class _Branch(NamedTuple):
    """What follows the joined sources: a body, heads and projections.

    Inputs of heads and projections are numbered: the sources, the body's output, the outputs of the heads.
    """

    body: _Slot | None  # None: an identity, or the body of the branch before
    heads: list[_Head]
    projections: list[_Projection]


class ModularNetwork(Network):
    """Each observation through a source of its rank, all joined through the body, one head per output rank.

    ``pieces`` holds the sources as ``source/<observation>``, the ``body`` and the heads as ``head<rank>d``, without
    identities. ``projections`` holds the layers from a head to each output; with ``streams`` these have a hidden layer.
    With ``branches``, groups of outputs by name, each group has heads of its own, called ``<branch>/head<rank>d``, and
    a body of its own if only the sources are shared. ``parts`` lists all of them in order.
    """

    def __init__(self, spec: NetworkSpec, config: NetworkConfig) -> None:
        super().__init__()
        self.inputs, self.outputs = config.feature_shapes(spec.inputs, spec.categories), spec.outputs
        self._config = config = config.resolved(self.inputs, self.outputs)
        self._streams, self._noisy, self._over = spec.streams, spec.noisy, dict(spec.over)
        self.orthogonal = config.orthogonal
        self.pieces, self.embeddings, self.projections = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        # forward uses these lists, because looking a module up by name costs as much as a small operation
        self.parts: list[Part] = []
        self._slots: list[_Slot] = []
        self._sources: list[_Source] = []
        self._branches: list[_Branch] = []

        for name, shape in self.inputs.items():
            self._add_source(name, shape, spec.masks.get(name, ""), spec.categories.get(name, 0))
        self._join, self._context = self._plan_body()
        own_bodies = bool(spec.branches) and config.shared == "sources"
        if own_bodies and not self._slots:
            raise UserError(
                'network.shared is "sources", but no source has parameters to share; set it to body, yes or no.'
            )
        shared_body = None if own_bodies else self._add_body("body")
        for branch, names in (spec.branches or {"": tuple(spec.outputs)}).items():
            place = f"{branch}/" if branch else ""
            slot, shape = shared_body or self._add_body(f"{place}body")
            heads, projections = self._add_heads(place, slot.name, shape, {name: spec.outputs[name] for name in names})
            again = shared_body is not None and bool(self._branches)
            self._branches.append(_Branch(None if again or slot.piece is None else slot, heads, projections))
        self.recurrent = any(slot.piece.recurrent for slot in self._slots)

    def _add_source(self, name: str, shape: Shape, mask: str, categories: int) -> None:
        config, rank = self._config, len(shape)
        if rank not in (1, 2, 3, 4):
            raise UserError(f'Observation "{name}" has shape {shape}: a modular network takes ranks 1 to 4.')
        place = f"source/{module_key(name)}"
        first = next((source for source in self._sources if config.share_source(name, source.observation)), None)
        if first is not None:
            self._check_shared(name, shape, categories, first)
            slot = first.slot._replace(name=place)
            if slot.piece is not None:
                self._slots.append(slot)
            self.parts.append(Part(place, f"shared with {first.observation}", (name,), shape, first.shape, None))
            self._sources.append(first._replace(observation=name, slot=slot, mask=mask))
            return
        embedding = None
        if categories:
            embedding = self.embeddings[module_key(name)] = nn.Embedding(categories, config.embedding)
            self.parts.append(Part(f"embedding/{name}", "embedding", (name,), shape[1:], shape, embedding))
        given = f"embedding/{name}" if categories else name
        slot, output = self._add(place, *config.source_for(name, shape), shape, (given,), (rank,))
        self._sources.append(_Source(name, slot, mask, embedding, output))

    def _check_shared(self, name: str, shape: Shape, categories: int, first: _Source) -> None:
        """Refuse to share a source between observations of different shapes or categories."""
        other = first.observation
        if self.inputs[other] != shape:
            raise UserError(
                f'network.share lets "{other}" and "{name}" share a source, but their shapes are {self.inputs[other]} '
                f"and {shape}; share observations of equal shape only."
            )
        known: Any = first.embedding
        if (known.num_embeddings if known is not None else 0) != categories:
            raise UserError(
                f'network.share lets "{other}" and "{name}" share a source, but they differ in their categories; share '
                "observations of equal kind only."
            )

    def _plan_body(self) -> tuple[Join, Join | None]:
        """Plan the input of the body, and its context if it uses one: then the lists are the context, not input."""
        body, sources = self._config.body, self._sources
        rank, place = piece_class(body, "network.body").dim, f"the body {body}"
        shapes = {source.observation: source.shape for source in sources}
        masks = {source.observation: source.output_mask for source in sources if source.output_mask}
        if not uses_context(body, "network.body"):
            return plan_join(shapes, rank, place, masks), None
        lists: Shapes = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        others: Shapes = {name: shape for name, shape in shapes.items() if len(shape) != 2}
        if not lists:
            raise UserError(
                f'network.body is "{body}", which attends to lists, but no source gives a list; choose sources that '
                f"keep one, such as network.net2d {KEEPING[2]}, or another body."
            )
        if not others:
            raise UserError(
                f'network.body is "{body}", but all sources give lists and none gives its queries; choose a body with '
                "learned queries, such as transformer_dec(queries=4)."
            )
        names = list(shapes)
        context, queries = (
            plan_join(some, rank_, place, masks)._replace(parts=tuple(map(names.index, some)))
            for some, rank_ in ((lists, 2), (others, rank))
        )
        return queries, context

    def _add_body(self, place: str) -> tuple[_Slot, Shape]:
        sources = tuple(source.slot.name for source in self._sources)
        context = None if self._context is None else self._context.shape
        return self._add(place, self._config.body, "network.body", self._join.shape, sources, context=context)

    def _add_heads(
        self, place: str, body: str, body_shape: Shape, outputs: Shapes
    ) -> tuple[list[_Head], list[_Projection]]:
        """Add the heads and projections of some outputs, for a body of this name and output shape.

        A head gets the body's output, cast to its rank unless the piece takes the body's rank. Where the body does not
        keep the map or list of an output, the head gets the sources that do, joined with a vector: the body's output,
        or that of head1d if the body's is none.
        """
        keys = {name: _head_key(shape, self._over.get(name, "")) for name, shape in outputs.items()}
        entries = piece_class(self._config.body, "network.body").keeps_entries
        of_body = [key for key in keys.values() if _keeps(body_shape, *key[:2]) and (entries or not key.over)]
        on_sources = {key for key in keys.values() if key.rank > 1 and key not in of_body}
        needed = {*keys.values()}
        if on_sources and len(body_shape) > 1:
            needed.add(_head_key((1,)))
        body_number = len(self._sources)
        vector = body_number, body, body_shape
        heads: list[_Head] = []
        found: dict[_HeadKey, tuple[int, str, Shape]] = {}  # number, name and shape of each head's output
        for key in sorted(needed):
            rank = key.rank
            name = f"{place}head{rank}d"
            if name in self.pieces or any(other.rank == rank for other in found):
                name += f"/{module_key(key.over) or '×'.join(map(str, key.space))}"
            piece, setting = self._config.heads[rank - 1], f"network.head{rank}d"
            if key in on_sources:
                output = next(output for output in outputs if keys[output] == key)
                join, given = self._join_sources(key, output, vector, body_shape)
                slot, shape = self._add(name, piece, setting, join.shape, given, (rank,))
            else:
                dim = len(body_shape) if piece_class(piece, setting).dim == len(body_shape) else rank
                join = Join(dim, cast_shape(body_shape, dim), (body_number,))
                slot, shape = self._add(name, piece, setting, join.shape, (body,), (rank, len(body_shape)))
                if slot.piece is None and len(body_shape) == rank:
                    found[key] = body_number, name, body_shape
                    continue
            heads.append(_Head(slot, rank, join))
            found[key] = body_number + len(heads), name, cast_shape(shape, rank)
            if rank == 1 and len(body_shape) > 1:
                vector = found[key]
        projections = []
        for name, shape in outputs.items():
            number, given_name, features = found[keys[name]]
            layer = make_projection(name, shape, features, self._config, self._streams, self._noisy)
            self.parts.append(Part(f"output/{name}", type(layer).__name__, (given_name,), features, shape, layer))
            self.projections[module_key(name)] = layer
            projections.append(_Projection(name, layer, number, shape))
        return heads, projections

    def _join_sources(
        self, key: _HeadKey, output: str, vector: tuple[int, str, Shape], body: Shape
    ) -> tuple[Join, tuple[str, ...]]:
        """Join the sources with the map or list of an output with a vector; return also the names of all these."""
        rank, space, over = key
        found = {
            i: source
            for i, source in enumerate(self._sources)
            if _keeps(source.shape, rank, space) and over in ("", source.observation)
        }
        if not found:
            kind, size = ("list", "length") if rank == 2 else ("map", "size")
            shapes = ", ".join(f'"{source.observation}" {source.shape}' for source in self._sources)
            raise UserError(
                f'Output "{output}" of shape {self.outputs[output]} needs a {kind} of the same {size}'
                f"{f' from the observation {over}' if over else ''}, but the body {self._config.body} gives {body} and "
                f"the sources give {shapes}; choose sources that keep the {kind}, such as network.net{rank}d "
                f"{KEEPING[rank]}, or a body of rank {rank}."
            )
        number, name, shape = vector
        masks = {source.observation: source.output_mask for source in found.values() if source.output_mask}
        parts: Shapes = {source.observation: source.shape for source in found.values()}
        join = plan_join({**parts, "": shape}, rank, f"the output {output}", masks)
        return join._replace(parts=(*found, number)), (*(source.slot.name for source in found.values()), name)

    def _add(
        self,
        place: str,
        piece: str,
        setting: str,
        shape: Shape,
        given: tuple[str, ...],
        ranks: tuple[int, ...] = (),
        context: Shape | None = None,
    ) -> tuple[_Slot, Shape]:
        """Make a piece, register it unless it is an identity, and return it with its output shape.

        ``given`` are the parts that it gets. ``ranks`` are those of pieces that fit its place; (): all do. ``context``
        is the shape of the lists that it attends to.
        """
        dim = piece_class(piece, setting).dim
        rank = None if not ranks or dim in ranks else ranks[0]
        made = make_piece(piece, setting, shape, self._config, rank, context)
        identity = isinstance(made, Identity)
        self.parts.append(Part(place, piece, given, shape, made.output_shape(), None if identity else made))
        if identity:
            return _Slot(place, None), made.output_shape()
        if noisy_layers(made) and not self._noisy:
            raise UserError(
                f'{setting} is "{piece}", whose noise this agent would never redraw: choose an agent with noisy layers '
                "(--agent rainbow, or --agent.noisy)."
            )
        self.pieces[place] = made
        self._slots.append(_Slot(place, made))
        return self._slots[-1], made.output_shape()

    def initial_state(self, batch: int) -> HiddenState:
        state = HiddenState()
        for slot in self._slots:
            state.update(slot.piece.initial_state(batch).with_prefix(slot.name))
        return state

    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        outputs: Tensors = {}
        recurrence = _Recurrence(state, first, HiddenState())
        sources = [source.run(observation, recurrence) for source in self._sources]
        x = y = self._join(sources)
        context = None if self._context is None else self._context(sources)
        for body, heads, projections in self._branches:
            if body is not None:
                y = body.run(x, recurrence, context)
            features = [*sources, y]
            for slot, rank, join in heads:
                features.append(cast_features(slot.run(join(features), recurrence), rank))
            for name, layer, number, shape in projections:
                z, mask = features[number]
                z = layer(z) if mask is None else zero_padding(layer(z), mask)
                outputs[name] = z.reshape(*first.shape, *shape)
        return outputs, recurrence.new_state

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
        return slot.piece if type(slot.piece) is MLP and slot.piece.plain and vectors and linear else None


class _HeadKey(NamedTuple):
    """Outputs of equal rank, size and observation have one head."""

    rank: int
    space: Shape
    over: str


def _head_key(shape: Shape, over: str = "") -> _HeadKey:
    return _HeadKey(max(1, len(shape)), shape[1:], over)


def _keeps(shape: Shape, rank: int, space: Shape) -> bool:
    """Return whether a body or source gives the map or list of an output; the frames of a clip make one map."""
    return (len(shape) == rank or (len(shape), rank) == (4, 3)) and cast_shape(shape, rank)[1:] == space


def module_key(name: str) -> str:
    """Return the key of a name in a ModuleDict, where PyTorch forbids dots."""
    return name.replace(".", "·")
