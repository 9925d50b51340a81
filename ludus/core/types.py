"""Names for plain types: tensors by name, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

Tensors = dict[str, Tensor]
SumOverRanks = Callable[[Tensor], Tensor]  # over ranks, as ``Updater.sum``
State = dict[str, Any]  # nested dicts of tensors and plain values (numbers, strings, lists, None), as in a checkpoint


@runtime_checkable
class Stateful(Protocol):
    """All that a checkpoint walks."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> Any: ...


def single_rank(x: Tensor) -> Tensor:
    """The sum over ranks where there is one: ``x`` itself."""
    return x
