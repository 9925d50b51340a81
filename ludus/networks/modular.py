"""A network put together from pieces by name: sources, body, heads, projections."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.imports import resolve
from ludus.core.network import Network, Shape, Shapes, SubModule
from ludus.core.types import Tensors
from ludus.networks import SUBMODULES
from ludus.networks.cast import cast, cast_shape
from ludus.networks.config import NetworkConfig
from ludus.networks.identity import Identity
from ludus.networks.init import initialize
from ludus.networks.net1d.mlp import MLP
from ludus.networks.untouched import untouched
from ludus.ops import fused

GAINS = {"policy": 0.01, "value": 1.0}  # by the first part of an output's name; 1 for all others

NO_STATE = HiddenState()  # of feed-forward pieces


class _Place(NamedTuple):
    name: str
    piece: Any  # None where there is nothing to do
    recurrent: bool


class ModularNetwork(Network):
    """Each observation through the source of its rank, all joined through the body, one head per output rank.

    ``pieces`` holds those that do something by their place: ``source/<observation>``, ``body``, ``head<rank>d``; the
    hidden state of a recurrent piece carries the name of its place. ``projections`` has the last layer of each output,
    or its last two with ``streams``.
    """

    def __init__(
        self, inputs: Shapes, outputs: Shapes, config: NetworkConfig, streams: bool = False, noisy: bool = False
    ) -> None:
        super().__init__()
        config = config.resolved(len(inputs))
        self.inputs, self.outputs = inputs, outputs
        self.pieces = nn.ModuleDict()
        joined = self._add_sources(config)
        self._body_shape = self._add("body", joined, config.body, config)
        heads = {rank: self._add_head(rank, config) for rank in sorted({max(1, len(s)) for s in outputs.values()})}
        self.projections = nn.ModuleDict()
        for name, shape in outputs.items():
            wanted = name, shape, heads[max(1, len(shape))], config
            self.projections[module_key(name)] = _projection(*wanted, streams, noisy)
        self.recurrent = any(piece.recurrent for piece in self._submodules().values())
        # what forward walks: plain tuples, because looking a module up by name costs as much as a small operation
        self._sources = [(name, self._at(source_place(name))) for name in inputs]
        self._body = self._at("body")
        self._heads = [(rank, self._at(f"head{rank}d")) for rank in heads]
        self._projections = [
            (name, self.projections[module_key(name)], max(1, len(shape)), shape) for name, shape in outputs.items()
        ]
        piece = self.only_mlp()
        self._shapes = list(outputs.values())
        self._mlp = [piece] if piece is not None and piece.activation in fused.ACTIVATIONS else []  # a list hides it

    def _add(self, place: str, shape: Shape, name: str, config: NetworkConfig) -> Shape:
        """Put a piece in its place, unless it does nothing, and return the shape that comes out."""
        piece = _make_piece(name, shape, config)
        if not isinstance(piece, Identity):
            self.pieces[place] = piece
        return piece.output_shape()

    def _add_sources(self, config: NetworkConfig) -> Shape:
        """Add a source per observation; return the shape of all their outputs joined in the rank of the body."""
        self._body_rank = piece_rank(config.body, "body")
        shapes: Shapes = {}
        for name, shape in self.inputs.items():
            rank = len(shape)
            if rank not in (1, 2, 3, 4):
                raise UserError(f'Observation "{name}" has shape {shape}: a modular network takes ranks 1 to 4.')
            piece = config.net3d_for(shape) if rank == 3 else getattr(config, f"net{rank}d")
            piece_rank(piece, f"net{rank}d", rank)
            shapes[name] = cast_shape(self._add(source_place(name), shape, piece, config), self._body_rank)
        joined = join_shapes(shapes, config.body)
        self._space = joined[1:]
        self._expand = any(shape[1:] != self._space for shape in shapes.values())
        return joined

    def _add_head(self, rank: int, config: NetworkConfig) -> Shape:
        shape = cast_shape(self._body_shape, rank)
        name = config.head if piece_rank(config.head, "head") == rank else f"identity{rank}d"
        return cast_shape(self._add(f"head{rank}d", shape, name, config), rank)

    def _submodules(self) -> dict[str, Any]:
        return dict(self.pieces.items())

    def _at(self, place: str) -> _Place:
        piece = self._submodules().get(place)
        return _Place(place, piece, piece is not None and piece.recurrent)

    def initial_state(self, batch: int) -> HiddenState:
        state = HiddenState()
        for place, piece in self._submodules().items():
            state.update(piece.initial_state(batch).with_prefix(place))
        return state

    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        if self._mlp and (parameters := self._parameters_of_mlp()) is not None:
            seen = [observation[name] for name in self.inputs]
            x, shapes = seen[0] if len(seen) == 1 else torch.cat(seen, -1), [first.shape + s for s in self._shapes]
            depth = len(parameters) // 2 - len(shapes)
            made = fused.mlp(x, self._mlp[0].activation, depth, parameters, shapes)
            return dict(zip(self.outputs, made, strict=True)), NO_STATE
        after = HiddenState()
        rank = self._body_rank
        parts = [
            cast(_run(at, observation[name].flatten(0, 1), state, first, after), rank) for name, at in self._sources
        ]
        x = _run(self._body, self._join(parts), state, first, after)
        heads = {rank: cast(_run(at, cast(x, rank), state, first, after), rank) for rank, at in self._heads}
        time, batch = first.shape
        outputs = {
            name: projection(heads[rank]).reshape(time, batch, *shape)
            for name, projection, rank, shape in self._projections
        }
        return outputs, after

    def _join(self, parts: list[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        if self._expand:
            parts = [x.expand(*x.shape[:2], *self._space) for x in parts]
        return torch.cat(parts, 1)

    @property
    def linear(self) -> bool:
        """Whether no hidden layer lies between the observations and the outputs."""
        empty = all(isinstance(piece, MLP) and not piece.layers for piece in self._submodules().values())
        last = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        return empty and all(type(layer) in last for layer in self.projections.values())

    def only_mlp(self) -> MLP | None:
        """The MLP, if all that the network does is to join vectors, send them through it and project what comes out."""
        (place, piece), *others = self.pieces.items() or [("", None)]
        together = len(self.inputs) == 1 or not place.startswith("source/")
        vectors = all(len(shape) == 1 for shape in self.inputs.values())
        vectors = vectors and all(len(shape) <= 1 for shape in self.outputs.values())
        linear = all(type(layer) is nn.Linear for layer in self.projections.values())
        plain = type(self) is ModularNetwork and not others and together and vectors and linear
        return piece if type(piece) is MLP and plain else None

    def _parameters_of_mlp(self) -> list[Tensor] | None:
        """Weight and bias of each layer; None where a layer is called in another way than ``fused.mlp`` runs it."""
        if not fused.is_eager():
            return None
        (piece,) = self._mlp
        layers: list[nn.Module] = [*piece._modules["layers"]._modules.values(), *self.projections._modules.values()]  # type: ignore[union-attr]
        if not untouched((piece, *layers)):
            return None
        parameters: list[Tensor] = []
        for layer in layers:
            weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
            if type(layer) is not nn.Linear or weight is None or bias is None or not weight.is_cpu:
                return None
            parameters += (weight, bias)
        return parameters


def _make_piece(name: str, shape: Shape, config: NetworkConfig) -> SubModule:
    try:
        piece: SubModule = resolve(name, SUBMODULES, "piece of a network")(shape, config)
    except Exception as error:
        if ":" not in name or isinstance(error, UserError):
            raise
        raise UserError(
            f'The piece "{name}" of the network cannot be made for an input of shape {shape}: '
            f"{type(error).__name__}: {error}; fix its constructor."
        ) from error
    return piece


def _run(at: _Place, x: Tensor, state: HiddenState, first: Tensor, after: HiddenState) -> Tensor:
    """Run the piece at a place on ``x`` ``[T·B, …]``, if there is one, and note its state in ``after``."""
    if at.piece is None:
        return x
    if not at.recurrent:
        y: Tensor = at.piece(x, NO_STATE, first)[0]
        return y
    y, new = at.piece(x.view(*first.shape, *x.shape[1:]), state.select(at.name), first)
    after.update(new.with_prefix(at.name))
    return y.flatten(0, 1)


def module_key(name: str) -> str:
    """The name under which a module is kept: PyTorch forbids dots in it."""
    return name.replace(".", "·")


def source_place(name: str) -> str:
    """The place of the source of one observation."""
    return f"source/{module_key(name)}"


def piece_rank(name: str, setting: str, needed: int | None = None) -> int:
    """The rank that a piece takes; a UserError if that is not the rank ``needed`` at its place."""
    piece = resolve(name, SUBMODULES, f"network.{setting}")
    rank: int | None = getattr(piece, "dim", None)
    if rank not in (1, 2, 3, 4) or not (isinstance(piece, type) and issubclass(piece, SubModule)):
        raise UserError(
            f'network.{setting} "{name}" is no piece of a network: it needs to be a ludus.core.network.SubModule.'
        )
    if needed not in (None, rank):
        raise UserError(
            f'network.{setting} is "{name}", which takes tensors of rank {rank}: give a piece of rank {needed}.'
        )
    return rank


def join_shapes(shapes: Shapes, body: str) -> Shape:
    """The shape of sources joined on features, sizes of 1 expanded; a UserError where they do not fit together."""
    names = list(shapes)
    space = list(shapes[names[0]][1:])
    owner = [names[0]] * len(space)  # who decided each size
    for name in names[1:]:
        for i, size in enumerate(shapes[name][1:]):
            if size != space[i] and 1 not in (size, space[i]):
                raise UserError(
                    f'Observations "{owner[i]}" and "{name}" cannot be joined for the body {body}: their sources give '
                    f"{shapes[owner[i]]} and {shapes[name]}; choose other pieces for them, or a body of rank 1."
                )
            if space[i] == 1:
                space[i], owner[i] = size, name
    return (sum(shape[0] for shape in shapes.values()), *space)


def _projection(name: str, shape: Shape, head: Shape, config: NetworkConfig, streams: bool, noisy: bool) -> nn.Module:
    """The last layer of one output: linear, or a convolution of size 1 where the output has space."""
    gain = GAINS.get(name.split("/")[0], 1.0)
    if streams or noisy:
        from ludus.networks.streams import make_last_layers  # only agents that ask for these load them

        return make_last_layers(name, shape, head, config, gain, streams, noisy)
    features = shape[0] if shape else 1
    if shape[1:] != head[1:]:
        raise UserError(
            f'Output "{name}" of shape {shape} cannot be made from head{len(head)}d, which gives {head}: choose a body '
            "and a head that keep its height and width."
        )
    layers = {1: nn.Linear, 2: nn.Conv1d, 3: nn.Conv2d, 4: nn.Conv3d}
    arguments = (head[0], features) if len(head) == 1 else (head[0], features, 1)
    layer: Any = layers[len(head)](*arguments)
    made: nn.Module = initialize(layer, gain, config.orthogonal)
    return made
