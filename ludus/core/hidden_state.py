"""The hidden state of recurrent networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class HiddenState(dict[str, Tensor]):
    """What a network remembers: name of the piece's place → tensor ``[B, …]``. Empty for a feed-forward network."""

    def map(self, function: Callable[[Tensor], Tensor]) -> HiddenState:
        """Apply ``function`` to every tensor."""
        return HiddenState({name: function(x) for name, x in self.items()})

    def detach(self) -> HiddenState:
        """Cut the graph."""
        return self.map(Tensor.detach)

    def reset(self, first: Tensor) -> HiddenState:
        """Zero the rows where an episode begins (``first``: ``[B]``)."""
        return self.map(lambda x: x.masked_fill(first.reshape(-1, *[1] * (x.dim() - 1)), 0))

    def rows(self, index: Tensor | slice) -> HiddenState:
        """Pick rows of the batch."""
        return self.map(lambda x: x[index])

    @staticmethod
    def concatenate(parts: list[HiddenState]) -> HiddenState:
        """The rows of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        return HiddenState({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def select(self, place: str) -> HiddenState:
        """The part that belongs to ``place``, its prefix removed."""
        start = place + "/"
        return HiddenState({name[len(start) :]: x for name, x in self.items() if name.startswith(start)})

    def with_prefix(self, place: str) -> HiddenState:
        """The same tensors under the prefix ``place``."""
        return HiddenState({f"{place}/{name}": x for name, x in self.items()})
