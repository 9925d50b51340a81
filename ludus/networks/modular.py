"""A network assembled from named pieces: sources, body, heads, projections."""

from __future__ import annotations

from torch import Tensor, nn

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.core.types import Tensors
from ludus.networks.assembly import Assembly
from ludus.networks.cast import cast_features, zero_padding
from ludus.networks.config import NetworkConfig
from ludus.networks.net1d.mlp import MLP
from ludus.networks.slots import Recurrence


class ModularNetwork(Network):
    """Each observation through a source of its rank, all joined through the body, one head per output rank.

    ``pieces`` holds the sources as ``source/<observation>``, the ``body`` and the heads as ``head<rank>d``, without
    identities. ``projections`` holds the layers from a head to each output; with ``streams`` these have a hidden layer.
    With ``branches``, groups of outputs by name, each group has heads of its own, called ``<branch>/head<rank>d``, and
    a body of its own if only the sources are shared. ``parts`` lists all of them in order.
    """

    def __init__(self, spec: NetworkSpec, config: NetworkConfig) -> None:
        super().__init__()
        made = Assembly(spec, config)
        self.inputs, self.outputs, self.parts, self.orthogonal = (
            made.inputs,
            made.outputs,
            made.parts,
            config.orthogonal,
        )
        self.pieces, self.embeddings, self.projections = made.pieces, made.embeddings, made.projections
        # forward uses these lists, because looking a module up by name costs as much as a small operation
        self._sources, self._join, self._context, self._branches = made.sources, made.join, made.context, made.branches
        self._slots = made.slots
        self.recurrent = any(slot.piece.recurrent for slot in self._slots)

    def initial_state(self, batch: int) -> HiddenState:
        state = HiddenState()
        for slot in self._slots:
            state.update(slot.piece.initial_state(batch).with_prefix(slot.name))
        return state

    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        outputs: Tensors = {}
        recurrence = Recurrence(state, first, HiddenState())
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
