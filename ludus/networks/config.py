"""Settings of a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ludus.core.calls import parse_call
from ludus.core.errors import UserError
from ludus.core.imports import resolve
from ludus.networks import SUBMODULES

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]

Shapes = dict[str, tuple[int, ...]]  # as in ludus.core.network, which imports torch

NATURE_CNN_SIDE = 36  # the smallest image side that nature_cnn accepts


@dataclass(frozen=True)
class NetworkConfig:
    """How observations become outputs; --network.critic.hidden sets a value for the critic only.

    A piece may have arguments, as in lstm(size=128). A custom one is pkg.mod:Class, made as Class(input_shape, config,
    **arguments).
    """

    name: str = "modular"  # or package.module:Class: a custom Network, or any torch module (ludus.networks.build)
    # source of each vector observation; with several observations and body auto, one mlp gets all vectors concatenated
    net1d: str = "mlp"
    # source of each list or matrix observation [F, S]; auto: flat_mlp, an mlp over the flattened matrix, or entity_mlp,
    # which keeps the list, if an output is about its entries
    net2d: str = "auto"
    # source of each image observation [F, H, W]; auto: nature_cnn, or small_cnn below 36×36, or sc2le_encoder, which
    # keeps the map, if an output is about its places
    net3d: str = "auto"
    net4d: str = "identity4d"  # source of each volume or clip observation [F, D, H, W]
    # applied to all observations, concatenated; lstm makes the network recurrent; auto: an mlp for several
    # observations; sc2le_decoder and head1d small_cnn if an output is about the places of the only map, to keep it
    body: str = "auto"
    head1d: str = "identity1d"  # between the body and the outputs that are vectors, such as logits and values
    head2d: str = "identity2d"  # the same for outputs that are lists [F, S], such as one logit per entity
    head3d: str = "identity3d"  # the same for outputs that are maps [F, H, W], such as one logit per pixel
    head4d: str = "identity4d"  # the same for outputs that are volumes [F, D, H, W]
    hidden: tuple[int, ...] = (64, 64)  # layer sizes of an mlp; larger fits more and is slower: 256 256 suits robots
    activation: Activation = "tanh"  # after each layer of an mlp; tanh suits PPO and A2C, relu off-policy agents
    lstm_size: int = 64  # units of an lstm, gru or min_gru; the cost grows with the square
    # sources of single observations instead of net1d to net4d: 'camera/*=nature_cnn' 'units=entity_mlp'
    sources: tuple[str, ...] = ()
    # observations that match the same pattern share one source, as camera/left and camera/right do with 'camera/*'
    share: tuple[str, ...] = ()
    embedding: int = 8  # features of each category in a map or list of categories; more for many categories
    # one network for policy and value: cheaper, often learns slower; auto: yes for images of 64×64 and more; sources:
    # only the sources are shared; body: sources and body, but not the heads
    shared: Literal["auto", "yes", "no", "sources", "body"] = "auto"
    # names of the observations that the network gets; * matches any part of a name: network.actor.sees 'policy/*'; a !
    # before a name leaves it out: network.actor.sees '*' '!state'
    sees: tuple[str, ...] = ("*",)
    orthogonal: bool = True  # orthogonal initial weights and a nearly uniform initial policy; off: PyTorch's defaults

    def resolved(self, inputs: Shapes, outputs: Shapes) -> NetworkConfig:
        """Return the settings with ``auto`` decided, except for ``net3d`` where its source depends on the image's size.

        Several vectors and matrices are concatenated before an mlp: with separate layers joined only by a linear one,
        the output would be a sum over observations. Sources keep the lists and maps that outputs are about; the mlp
        gives such outputs a vector of everything. For an output about the places of the only map, the body is a
        convolution over that map and the vectors, and a CNN gives the vector for other outputs: an mlp over the
        flattened map would have millions of parameters.
        """
        ranks = {len(shape) for shape in outputs.values()}
        several = self.body == "auto" and (len(inputs) > 1 or max(ranks, default=1) > 1)
        keeps_map = several and 3 in ranks and _has_one_map(inputs)
        lists = "entity_mlp" if 2 in ranks else "identity2d" if several else "flat_mlp"
        body = "sc2le_decoder" if keeps_map else "mlp" if several else "identity1d"
        return replace(
            self,
            net1d="identity1d" if several and self.net1d == "mlp" else self.net1d,
            net2d=lists if self.net2d == "auto" else self.net2d,
            net3d="sc2le_encoder" if self.net3d == "auto" and 3 in ranks else self.net3d,
            body=body if self.body == "auto" else self.body,
            head1d="small_cnn" if keeps_map and self.head1d == "identity1d" else self.head1d,
        )

    @property
    def may_be_recurrent(self) -> bool:
        """Return whether some piece is recurrent, or custom and so possibly recurrent."""
        return self.name != "modular" or any(map(_may_be_recurrent, self.pieces))

    @property
    def pieces(self) -> tuple[str, ...]:
        """Return all pieces: sources, body and heads."""
        return (*self.nets, *(piece for _, piece in self.own_sources), self.body, *self.heads)

    @property
    def nets(self) -> tuple[str, ...]:
        """Return the sources of rank 1 to 4."""
        return (self.net1d, self.net2d, self.net3d, self.net4d)

    @property
    def own_sources(self) -> list[tuple[str, str]]:
        """Return the patterns and pieces in ``sources``."""
        return [(pattern.strip(), piece.strip()) for pattern, _, piece in (x.partition("=") for x in self.sources)]

    @property
    def heads(self) -> tuple[str, ...]:
        """Return the heads of rank 1 to 4."""
        return (self.head1d, self.head2d, self.head3d, self.head4d)

    def feature_shapes(self, inputs: Shapes, categories: Mapping[str, int]) -> Shapes:
        """Return the shapes of observations with those of categories embedded: ``[H, W]`` → ``[embedding, H, W]``."""
        return {name: (self.embedding, *shape) if name in categories else shape for name, shape in inputs.items()}

    def source_for(self, name: str, shape: tuple[int, ...]) -> tuple[str, str]:
        """Return the source of an observation of rank 1 to 4, and the setting that names it."""
        for pattern, piece in self.own_sources:
            if fnmatchcase(name, pattern):
                return piece, f"network.sources {pattern}"
        piece = self.nets[len(shape) - 1]
        if len(shape) == 3 and piece == "auto":
            piece = "nature_cnn" if min(shape[1:]) >= NATURE_CNN_SIDE else "small_cnn"
        return piece, f"network.net{len(shape)}d"

    def share_source(self, one: str, other: str) -> bool:
        """Return whether two observations match the same pattern of ``share``."""
        return any(fnmatchcase(one, pattern) and fnmatchcase(other, pattern) for pattern in self.share)

    def used_pieces(self, inputs: Shapes, outputs: Shapes) -> set[tuple[str, str]]:
        """Return the pieces of a network, each with its setting; ``inputs`` are those after ``feature_shapes``."""
        config = self.resolved(inputs, outputs)
        sources = (config.source_for(name, shape) for name, shape in inputs.items() if len(shape) in (1, 2, 3, 4))
        ranks = {max(1, len(shape)) for shape in outputs.values()}
        heads = ((config.heads[rank - 1], f"network.head{rank}d") for rank in ranks)
        return {*sources, (config.body, "network.body"), *heads}

    def visible(self, names: Iterable[str]) -> list[str]:
        """Return the observations among ``names`` that the network gets."""
        hidden = [pattern[1:] for pattern in self.sees if pattern.startswith("!")]
        return [name for name in names if _matches(name, self.sees) and not _matches(name, hidden)]

    def validate(self, table: str = "network") -> None:
        """Raise a UserError for invalid sizes; ``table`` prefixes the setting's name."""
        for size in self.hidden:
            if size < 1:
                raise UserError(f"{table}.hidden has a layer of {size}; every layer needs a size of 1 or more.")
        if self.lstm_size < 1:
            raise UserError(f"{table}.lstm_size is {self.lstm_size}; it must be 1 or more.")
        if self.embedding < 1:
            raise UserError(f"{table}.embedding is {self.embedding}; it must be 1 or more.")
        for text, (pattern, piece) in zip(self.sources, self.own_sources, strict=True):
            if not pattern or not piece:
                raise UserError(
                    f'{table}.sources has "{text}"; write an observation and its source, as in units=flat_mlp.'
                )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _has_one_map(inputs: Shapes) -> bool:
    """Return whether there is one image or clip, beside vectors alone."""
    return sorted(len(shape) for shape in inputs.values() if len(shape) > 1) in ([3], [4])


def _may_be_recurrent(piece: str) -> bool:
    name = parse_call(piece, "network").name
    return ":" in name or (name in SUBMODULES and bool(resolve(name, SUBMODULES, "piece of a network").recurrent))
