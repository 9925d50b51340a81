"""A batch as tensors by name, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ludus.core.batch import Batch
from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors


def to_tensors(batch: Batch, fields: Iterable[str]) -> Tensors:
    """Return the tensors of these fields by name; those of a field that holds several as ``field/name``."""
    found: Tensors = {}
    for field in fields:
        value = getattr(batch, field)
        if isinstance(value, dict):
            found |= {f"{field}/{name}": x for name, x in value.items()}
        else:
            found[field] = value
    return found


def to_batch(tensors: Tensors, **more: Any) -> Batch:
    """Return the batch of what ``to_tensors`` returned; ``more`` are other fields."""
    made: dict[str, Any] = {"observation": {}, "action": {}, "experience": {}, "state": HiddenState()}
    for key, x in tensors.items():
        field, slash, name = key.partition("/")
        if slash:
            made.setdefault(field, {})[name] = x
        else:
            made[field] = x
    return Batch(**(made | more))
