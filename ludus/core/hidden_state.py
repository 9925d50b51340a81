"""The hidden state of recurrent networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class HiddenState(dict[str, Tensor]):
    """Tensors ``[B, …]`` by name, such as ``actor/body/h``; empty for feed-forward networks."""

    def map(self, function: Callable[[Tensor], Tensor]) -> HiddenState:
        """Apply ``function`` to every tensor."""
        return HiddenState({name: function(x) for name, x in self.items()})

    def detach(self) -> HiddenState:
        """Detach every tensor."""
        return self.map(Tensor.detach)

    def reset(self, first: Tensor) -> HiddenState:
        """Zero the rows where ``first`` ``[B]`` is true."""
        return self.map(lambda x: x.masked_fill(first.reshape(-1, *[1] * (x.dim() - 1)), 0))

    def keep(self, where: Tensor, before: HiddenState) -> HiddenState:
        """Return the state, as it was ``before`` in rows where ``where`` is true: ``[B]``, or ``[B, n]``."""
        return HiddenState(
            {
                name: torch.where(where.reshape(*where.shape, *[1] * (x.dim() - where.dim())), before[name], x)
                for name, x in self.items()
            }
        )

    def rows(self, index: Tensor | slice) -> HiddenState:
        """Select rows of the batch."""
        return self.map(lambda x: x[index])

    @staticmethod
    def concatenate(parts: list[HiddenState]) -> HiddenState:
        """Concatenate states along the batch."""
        if len(parts) == 1:
            return parts[0]
        return HiddenState({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def select(self, prefix: str) -> HiddenState:
        """Return the tensors named ``prefix/…``, without the prefix."""
        start = prefix + "/"
        return HiddenState({name[len(start) :]: x for name, x in self.items() if name.startswith(start)})

    def with_prefix(self, prefix: str) -> HiddenState:
        """Return the same tensors named ``prefix/…``."""
        return HiddenState({f"{prefix}/{name}": x for name, x in self.items()})
