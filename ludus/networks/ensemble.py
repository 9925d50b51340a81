"""Ensembles of networks, for twin critics and several agents: outputs ``[T, B, E, …]``.

All members get the same input ``[T, B, …]``, or each its own if it is ``[T, B, E, …]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, Shapes
from ludus.core.types import Tensors
from ludus.networks.modular import ModularNetwork
from ludus.networks.slots import NO_STATE, module_key
from ludus.ops.activations import ACTIVATIONS


class Ensemble(Network):
    """Members of any kind, run one after the other; hidden states are prefixed by the member's number."""

    def __init__(self, members: Sequence[Network], inputs: Shapes) -> None:
        super().__init__()
        self._ranks = {name: len(shape) for name, shape in inputs.items()}
        self.members = nn.ModuleList(members)
        self.recurrent = members[0].recurrent
        self._members = [(str(i), member) for i, member in enumerate(members)]

    def initial_state(self, batch: int) -> HiddenState:
        state = HiddenState()
        for number, member in self._members:
            state.update(member.initial_state(batch).with_prefix(number))
        return state

    def forward(
        self, observation: Tensors, state: HiddenState, first: Tensor, members: int | None = None
    ) -> tuple[Tensors, HiddenState]:
        """Run all members, or only the first ``members``."""
        new_state, results = HiddenState(), []
        separate = [name for name, rank in self._ranks.items() if observation[name].dim() == 3 + rank]
        for i, (number, member) in enumerate(self._members[:members]):
            given = observation | {name: observation[name][:, :, i] for name in separate}
            outputs, new = member(given, state.select(number), first)
            results.append(outputs)
            new_state.update(new.with_prefix(number))
        return {name: torch.stack([outputs[name] for outputs in results], 2) for name in results[0]}, new_state


class BatchedLinear(nn.Module):
    """A linear layer per member: weights ``[E, in, out]``, biases ``[E, 1, out]``."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().t() for layer in layers]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]).unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[E, N, in]`` to ``[E, N, out]``; E may be less than the number of members."""
        whole = len(x) == len(self.weight)
        weight, bias = (self.weight, self.bias) if whole else (self.weight[: len(x)], self.bias[: len(x)])
        if weight.shape[-1] == 1:  # bmm with one column takes four times as long, backward too
            return (x * weight.mT).sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)


class BatchedMLPEnsemble(Network):
    """Members that are plain MLPs, run as one batched matrix multiplication per layer.

    A common input is expanded, not copied. One wide multiplication for the first layer would be slower, since the next
    layers would then read strided memory.
    """

    def __init__(self, members: Sequence[ModularNetwork]) -> None:
        super().__init__()
        self.inputs, self.outputs, self.size = members[0].inputs, members[0].outputs, len(members)
        mlps: list[Any] = [member.plain_mlp() for member in members]
        self.activation = mlps[0].activation
        self.layers = nn.ModuleList(BatchedLinear(layers) for layers in zip(*(m.layers for m in mlps), strict=True))
        self.projections = nn.ModuleDict(
            {key: BatchedLinear([m.projections[key] for m in members]) for key in members[0].projections}  # type: ignore[misc]
        )
        self._projections = [(n, self.projections[module_key(n)], shape) for n, shape in self.outputs.items()]

    def forward(
        self, observation: Tensors, state: HiddenState, first: Tensor, members: int | None = None
    ) -> tuple[Tensors, HiddenState]:
        """Run all members, or only the first ``members``."""
        parts = [observation[name].flatten(0, 1) for name in self.inputs]
        size = members or self.size
        if any(x.dim() == 3 for x in parts):  # [T·B, E, F]
            parts = [x.transpose(0, 1) if x.dim() == 3 else x.expand(size, *x.shape) for x in parts]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        x = x if x.dim() == 3 else x.expand(size, *x.shape)
        activate = torch.relu_ if self.activation == "relu" else ACTIVATIONS[self.activation]  # in place saves memory
        for layer in self.layers:
            x = activate(layer(x))
        outputs = {
            name: projection(x).transpose(0, 1).reshape(*first.shape, size, *shape)
            for name, projection, shape in self._projections
        }
        return outputs, NO_STATE


def make_ensemble(members: Sequence[Network], inputs: Shapes) -> Network:
    """Combine networks of the same architecture and ``inputs``, batched if they are plain MLPs."""
    plain = [member for member in members if isinstance(member, ModularNetwork) and member.plain_mlp() is not None]
    return BatchedMLPEnsemble(plain) if len(plain) == len(members) else Ensemble(members, inputs)
