"""Type aliases: tensors by name, and the contents of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]
SumOverRanks = Callable[[Tensor], Tensor]  # see ``Updater.sum``
State = dict[str, Any]  # nested dicts of tensors and plain values (numbers, strings, lists, None)


def single_rank(x: Tensor) -> Tensor:
    """Return ``x``: the sum over ranks if there is only one."""
    return x
