"""Convert a manager's state to checkpoints and back, and describe how environments were restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.environments.rows import StepArrays
from ludus.environments.spaces import Arrays

EXACTLY = "exactly"
FLAT = ("reward", "terminated", "truncated", "first", "seed")  # fields of StepArrays beside the observation


def to_tensors(tree: Any) -> Any:
    """Copy nested lists and dicts, with arrays converted to tensors."""
    return _map(tree, lambda x: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x)


def to_arrays(tree: Any) -> Any:
    """Copy nested lists and dicts, with tensors converted to arrays."""
    return _map(tree, lambda x: x.numpy().copy() if isinstance(x, Tensor) else x)


def save_step(memory: StepArrays) -> State:
    """Return the last step."""
    return to_tensors({"observation": memory.observation, **{name: getattr(memory, name) for name in FLAT}})  # type: ignore[no-any-return]


def load_step(state: State, memory: StepArrays) -> None:
    """Write a saved step to memory."""
    for name, x in memory.observation.items():
        x[:] = state["observation"][name].numpy()
    for name in FLAT:
        getattr(memory, name)[:] = state[name].numpy()


def save_actions(rows: Sequence[Arrays | None]) -> State:
    """Return the number of actions of each row (-1: not stored), and all actions concatenated."""
    kept = [actions for actions in rows if actions is not None]
    lengths = [-1 if actions is None else len(next(iter(actions.values()))) for actions in rows]
    names = kept[0] if kept else ()
    return {"lengths": lengths, "all": to_tensors({n: np.concatenate([actions[n] for actions in kept]) for n in names})}


def load_actions(state: State) -> list[Arrays | None]:
    """Return the actions of each row."""
    joined, rows, start = to_arrays(state["all"]), [], 0
    for length in state["lengths"]:
        end = start + max(0, length)
        rows.append(None if length < 0 else {name: x[start:end] for name, x in joined.items()})
        start = end
    return rows


def check_compatible(state: State, memory: StepArrays, name: str) -> None:
    """Refuse the state of another number of environments, or of environments with other observations."""
    batch, found = len(memory.reward), state["last"]["observation"]
    saved_batch = len(state["last"]["reward"])
    if saved_batch != batch:
        raise UserError(
            f"The checkpoint holds {saved_batch} environments, env.num is {batch}; set it to {saved_batch}."
        )
    shapes = {key: tuple(x.shape[1:]) for key, x in found.items()}
    expected = {key: x.shape[1:] for key, x in memory.observation.items()}
    if shapes != expected:
        raise UserError(
            f"The checkpoint holds observations {_shapes(shapes)}, but {name} gives {_shapes(expected)}; resume with "
            "the environment that the run was started with."
        )


def describe_restore(reasons: Mapping[int, str], batch: int, name: str) -> str:
    """Describe how environments were restored; ``reasons`` has the rows that were not."""
    if not reasons:
        return EXACTLY
    parts = []
    for why in dict.fromkeys(reasons.values()):
        rows = [row for row, reason in reasons.items() if reason == why]
        which = f"environment {rows[0]}" if len(rows) == 1 else f"environments {', '.join(map(str, rows))}"
        parts.append(f"{'all environments' if len(rows) == batch else which} of {name}: {why}")
    return f"restarted at an episode boundary: {'; '.join(parts)}"


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _map(tree: Any, function: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_map(value, function) for value in tree]
    return function(tree)
