"""Extract the numbers of an info dict, which are logged at the end of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def numeric_info(info: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the scalar numbers of one environment's info; nested keys are joined by ``/``."""
    found: dict[str, float] = {}
    for key, value in info.items():
        if isinstance(value, Mapping):
            found.update(numeric_info(value, f"{prefix}{key}/"))
        elif isinstance(value, bool | int | float | np.number | np.bool_):
            found[f"{prefix}{key}"] = float(value)
        elif isinstance(value, np.ndarray) and value.size == 1 and _is_number(value.dtype):
            found[f"{prefix}{key}"] = float(value.item())
    return found


def numeric_info_row(infos: Mapping[str, Any], row: int, prefix: str = "") -> dict[str, float]:
    """Return the same for one row of a vector environment's infos, where ``_key`` marks the rows that have ``key``."""
    found: dict[str, float] = {}
    for key, value in infos.items():
        is_marker = key.startswith("_") and key[1:] in infos
        present = infos.get(f"_{key}")
        if is_marker or (isinstance(present, np.ndarray) and not present[row]):
            continue
        if isinstance(value, Mapping):
            found.update(numeric_info_row(value, row, f"{prefix}{key}/"))
        elif isinstance(value, np.ndarray) and _is_number(value.dtype) and value.ndim and value[row].size == 1:
            found[f"{prefix}{key}"] = float(value[row].item())
    return found


def _is_number(dtype: np.dtype[Any]) -> bool:
    return np.issubdtype(dtype, np.number) or dtype == np.bool_
