"""A manager's arrays as tensors of a checkpoint and back, and the sentence on how its environments came back."""

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
FLAT = ("reward", "terminated", "truncated", "first", "seed")  # of a StepArrays, beside its observation


def tensors(tree: Any) -> Any:
    """Copy a nest with its arrays as tensors."""
    return _map(tree, lambda x: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x)


def arrays(tree: Any) -> Any:
    """Copy a nest with its tensors as arrays."""
    return _map(tree, lambda x: x.numpy().copy() if isinstance(x, Tensor) else x)


def step_state(memory: StepArrays) -> State:
    """The last step."""
    return tensors({"observation": memory.observation, **{name: getattr(memory, name) for name in FLAT}})  # type: ignore[no-any-return]


def load_step(state: State, memory: StepArrays) -> None:
    """Write a saved step into memory."""
    for name, x in memory.observation.items():
        x[:] = state["observation"][name].numpy()
    for name in FLAT:
        getattr(memory, name)[:] = state[name].numpy()


def actions_state(rows: Sequence[Arrays | None]) -> State:
    """The actions of all rows: how many each has (-1: none that help), and all of them one after another."""
    kept = [actions for actions in rows if actions is not None]
    lengths = [-1 if actions is None else len(next(iter(actions.values()))) for actions in rows]
    names = kept[0] if kept else ()
    return {"lengths": lengths, "all": tensors({n: np.concatenate([actions[n] for actions in kept]) for n in names})}


def load_actions(state: State) -> list[Arrays | None]:
    """The actions of each row."""
    joined, rows, start = arrays(state["all"]), [], 0
    for length in state["lengths"]:
        end = start + max(0, length)
        rows.append(None if length < 0 else {name: x[start:end] for name, x in joined.items()})
        start = end
    return rows


def check(state: State, memory: StepArrays, name: str) -> None:
    """Refuse what was saved of other environments."""
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


def told(reasons: Mapping[int, str], batch: int, name: str) -> str:
    """How the rows came back; ``reasons`` has those that did not."""
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
