"""Choose and connect the pieces of a modular network, by its spec and settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ludus.core.errors import UserError
from ludus.core.network import NetworkSpec, Shape, Shapes
from ludus.networks.cast import Join, cast_shape, plan_join
from ludus.networks.config import NetworkConfig
from ludus.networks.identity import Identity
from ludus.networks.noisy import noisy_layers
from ludus.networks.pieces import make_piece, piece_class, uses_context
from ludus.networks.projection import make_projection
from ludus.networks.slots import Branch, Head, Projection, Slot, Source, module_key

KEEPING = {2: "entity_mlp", 3: "sc2le_encoder", 4: "identity4d"}  # sources that keep lists, maps and volumes


class Part(NamedTuple):
    """A part of a network for `ludus show network`: a source, body, head or projection."""

    name: str
    kind: str  # the piece as in the settings, or the class of a layer
    inputs: tuple[str, ...]  # the observations or parts that it gets
    input_shape: Shape
    output_shape: Shape
    module: nn.Module | None  # None for an identity


class Assembly:
    """The pieces of a ``ModularNetwork``, which describes them, and how they are connected."""

    def __init__(self, spec: NetworkSpec, config: NetworkConfig) -> None:
        self.inputs, self.outputs = config.feature_shapes(spec.inputs, spec.categories), spec.outputs
        self._config = config = config.resolved(self.inputs, self.outputs)
        self._streams, self._noisy, self._over = spec.streams, spec.noisy, dict(spec.over)
        self.pieces, self.embeddings, self.projections = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.parts: list[Part] = []
        self.slots: list[Slot] = []
        self.sources: list[Source] = []
        self.branches: list[Branch] = []

        for name, shape in self.inputs.items():
            self._add_source(name, shape, spec.masks.get(name, ""), spec.categories.get(name, 0))
        self.join, self.context = self._plan_body()
        own_bodies = bool(spec.branches) and config.shared == "sources"
        if own_bodies and not self.slots:
            raise UserError(
                'network.shared is "sources", but no source has parameters to share; set it to body, yes or no.'
            )
        shared_body = None if own_bodies else self._add_body("body")
        for branch, names in (spec.branches or {"": tuple(spec.outputs)}).items():
            place = f"{branch}/" if branch else ""
            slot, shape = shared_body or self._add_body(f"{place}body")
            heads, projections = self._add_heads(place, slot.name, shape, {name: spec.outputs[name] for name in names})
            again = shared_body is not None and bool(self.branches)
            self.branches.append(Branch(None if again or slot.piece is None else slot, heads, projections))

    def _add_source(self, name: str, shape: Shape, mask: str, categories: int) -> None:
        config, rank = self._config, len(shape)
        if rank not in (1, 2, 3, 4):
            raise UserError(f'Observation "{name}" has shape {shape}: a modular network takes ranks 1 to 4.')
        place = f"source/{module_key(name)}"
        first = next((source for source in self.sources if config.share_source(name, source.observation)), None)
        if first is not None:
            self._check_shared(name, shape, categories, first)
            slot = first.slot._replace(name=place)
            if slot.piece is not None:
                self.slots.append(slot)
            self.parts.append(Part(place, f"shared with {first.observation}", (name,), shape, first.shape, None))
            self.sources.append(first._replace(observation=name, slot=slot, mask=mask))
            return
        embedding = None
        if categories:
            embedding = self.embeddings[module_key(name)] = nn.Embedding(categories, config.embedding)
            self.parts.append(Part(f"embedding/{name}", "embedding", (name,), shape[1:], shape, embedding))
        given = f"embedding/{name}" if categories else name
        slot, output = self._add(place, *config.source_for(name, shape), shape, (given,), (rank,))
        self.sources.append(Source(name, slot, mask, embedding, output))

    def _check_shared(self, name: str, shape: Shape, categories: int, first: Source) -> None:
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
        body, sources = self._config.body, self.sources
        rank, place = piece_class(body, "network.body").dim, f"the body {body}"
        shapes = {source.observation: source.shape for source in sources}
        masks = _output_masks(sources)
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

    def _add_body(self, place: str) -> tuple[Slot, Shape]:
        sources = tuple(source.slot.name for source in self.sources)
        context = None if self.context is None else self.context.shape
        return self._add(place, self._config.body, "network.body", self.join.shape, sources, context=context)

    def _add_heads(
        self, place: str, body: str, body_shape: Shape, outputs: Shapes
    ) -> tuple[list[Head], list[Projection]]:
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
        body_number = len(self.sources)
        vector = body_number, body, body_shape
        heads: list[Head] = []
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
            heads.append(Head(slot, rank, join))
            found[key] = body_number + len(heads), name, cast_shape(shape, rank)
            if rank == 1 and len(body_shape) > 1:
                vector = found[key]
        projections = []
        for name, shape in outputs.items():
            number, given_name, features = found[keys[name]]
            layer = make_projection(name, shape, features, self._config, self._streams, self._noisy)
            self.parts.append(Part(f"output/{name}", type(layer).__name__, (given_name,), features, shape, layer))
            self.projections[module_key(name)] = layer
            projections.append(Projection(name, layer, number, shape))
        return heads, projections

    def _join_sources(
        self, key: _HeadKey, output: str, vector: tuple[int, str, Shape], body: Shape
    ) -> tuple[Join, tuple[str, ...]]:
        """Join the sources with the map or list of an output with a vector; return also the names of all these."""
        rank, space, over = key
        found = {
            i: source
            for i, source in enumerate(self.sources)
            if _keeps(source.shape, rank, space) and over in ("", source.observation)
        }
        if not found:
            kind, size = ("list", "length") if rank == 2 else ("map", "size")
            shapes = ", ".join(f'"{source.observation}" {source.shape}' for source in self.sources)
            raise UserError(
                f'Output "{output}" of shape {self.outputs[output]} needs a {kind} of the same {size}'
                f"{f' from the observation {over}' if over else ''}, but the body {self._config.body} gives {body} and "
                f"the sources give {shapes}; choose sources that keep the {kind}, such as network.net{rank}d "
                f"{KEEPING[rank]}, or a body of rank {rank}."
            )
        number, name, shape = vector
        masks = _output_masks(found.values())
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
    ) -> tuple[Slot, Shape]:
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
            return Slot(place, None), made.output_shape()
        if noisy_layers(made) and not self._noisy:
            raise UserError(
                f'{setting} is "{piece}", whose noise this agent would never redraw: choose an agent with noisy layers '
                "(--agent rainbow, or --agent.noisy)."
            )
        self.pieces[place] = made
        self.slots.append(Slot(place, made))
        return self.slots[-1], made.output_shape()


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


def _output_masks(sources: Iterable[Source]) -> dict[str, str]:
    """Return the observation that masks the padding of each source's output, where that is a padded list."""
    masks = {}
    for source in sources:
        piece = source.slot.piece
        if not source.mask or len(source.shape) != 2 or (piece is not None and len(piece.input_shape) != 2):
            continue
        # a piece that pools the list gives no mask
        if piece is None or piece.output_mask(torch.ones(1, piece.input_shape[1], dtype=torch.bool)) is not None:
            masks[source.observation] = source.mask
    return masks
