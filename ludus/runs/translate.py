"""Translate observations and actions between an environment and a loaded policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.core.types import Tensors
from ludus.environments.preprocess import part_of, replace_part
from ludus.environments.spaces import Array, Arrays, Layout
from ludus.managers.base import BatchManager


class Translator:
    """Converts between values of an environment's spaces and named arrays ``[B, …]``, as its manager does."""

    def __init__(self, manager: BatchManager) -> None:
        self._manager, self._name, self._specs = manager, manager.name, manager.observation
        self._frames: list[dict[str, Array]] = []  # of each row: stacks of frames of the episode so far

    def reset(self) -> None:
        """Begin new stacks of frames."""
        self._frames = []

    def process_images(self, observation: Any, first: Any, keep: bool, stateless: bool) -> Any:
        """Apply the ops on images of ``preprocess.observation`` where they have not been applied, as by a wrapper.

        Rows that are ``first`` begin a stack of frames; ``keep`` the stacks for the next call. If it is ``stateless``,
        earlier frames are unknown, and raw images are refused where they would be stacked.
        """
        if (ops := self._manager.image_ops) is None:
            return observation
        for name, path in ops.paths.items():
            try:
                x = np.asarray(part_of(observation, path))
            except (KeyError, IndexError, TypeError):
                return observation  # refused by parse_observation
            (shape, dtype), spec = ops.raw[name], self._specs[name]
            done = x.shape[-len(spec.shape) :] == spec.shape and (shape != spec.shape or x.dtype == spec.dtype)
            if done or x.shape[-len(shape) :] != shape or x.ndim - len(shape) not in (0, 1):
                continue
            if stateless and name in ops.stacks:
                raise UserError(
                    f'{self._name}: the observation "{name}" has shape {x.shape}, one frame of a stack; with state=…, '
                    f"give the whole stack, of shape {spec.shape}."
                )
            rows, batched = (x, True) if x.ndim > len(shape) else (x[None], False)
            begins = np.broadcast_to(np.asarray(first, bool), (len(rows),))
            known = self._frames if len(self._frames) == len(rows) else [{} for _ in rows]
            frames = [{} if begins[i] else dict(known[i]) for i in range(len(rows))]
            y = [ops.process(name, row, frames[i]) for i, row in enumerate(rows.astype(dtype, copy=False))]
            observation = replace_part(observation, path, np.stack(y) if batched else y[0])
            if keep:
                self._frames = [known[i] | frames[i] for i in range(len(rows))]
        return observation

    def parse_observation(self, observation: Any, info: Mapping[str, Any]) -> tuple[Arrays, bool]:
        """Return an observation of one environment or of a batch as arrays ``[B, …]``, and whether it was a batch."""
        reader = self._manager.reader
        rows = self._count_rows(observation)
        batched = rows > 0
        if reader.mask_in_info and info.get(reader.mask_key) is None:
            raise UserError(
                f'{self._name} gives the action mask "{reader.mask_key}" in info: give it too, as in '
                "policy.act(observation, info)."
            )
        arrays = reader.read(observation, info, (rows,) if rows else ())
        for name, x in arrays.items():
            expected = self._specs[name].shape
            if x.shape[batched:] != expected:
                raise UserError(
                    f'{self._name}: the observation "{name}" has shape {x.shape}; give {expected}, or a batch of such.'
                )
            self._check_choices(name, x)
            self._check_integers(name, x)
            typed = x.astype(self._specs[name].dtype, copy=False)
            arrays[name] = np.ascontiguousarray(typed if batched else typed[None])
        return arrays, batched

    def _count_rows(self, observation: Any) -> int:
        """Return the number of rows of a batch of observations; 0 for a single observation."""
        layout = self._manager.reader.layout
        try:
            if layout.padded and not layout.leaves:  # a list may be a list of rows or of elements
                return _count_lists(layout, observation)
            name, array = next(iter(layout.flatten_leaves(observation).items()))
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{self._name}: the observation is a {type(observation).__name__} that lacks a part of "
                f"{', '.join(layout.specs)}; give it as the environment does."
            ) from error
        return len(array) if array.ndim == len(self._specs[name].shape) + 1 else 0

    def format_actions(self, actions: Tensors, batched: bool) -> Any:
        """Return policy-space actions ``[B, …]`` as the environment takes them: a batch, or the only row."""
        manager = self._manager
        arrays = manager.preprocess_actions({name: x.cpu().numpy() for name, x in actions.items()})
        return manager.layout.unflatten(arrays) if batched else manager.layout.unflatten_row(arrays, 0)

    def nest_actions(self, values: Mapping[str, Any]) -> Any:
        """Nest values by action name like the environment's action space; return a single one alone."""
        return self._manager.layout.nest(values)

    def _check_integers(self, name: str, x: NDArray[Any]) -> None:
        """Refuse numbers that the integer type of an observation cannot hold, such as an image divided by 255."""
        wanted = np.dtype(self._specs[name].dtype)
        if x.dtype == wanted or not np.issubdtype(wanted, np.integer) or not np.issubdtype(x.dtype, np.number):
            return
        limits = np.iinfo(wanted)
        wrong = (x < limits.min) | (x > limits.max) | (x != np.trunc(x))  # also where x is NaN
        if wrong.any():
            value = np.asarray(x)[wrong].flat[0]
            raise UserError(
                f'{self._name}: the observation "{name}" is {x.dtype} and has {value:g}, but its space is {wanted}: '
                f"give whole numbers from {limits.min} to {limits.max}, as the environment does."
            )

    def _check_choices(self, name: str, x: NDArray[Any]) -> None:
        """Refuse choices outside of the space, which an embedding does not have."""
        spec = self._specs[name]
        if spec.kind != "categorical":
            return
        wrong = (x < 0) | (x >= np.reshape(spec.sizes, spec.shape))
        if wrong.any():
            raise UserError(
                f'{self._name}: the observation "{name}" has the choice {x[wrong].flat[0]} (counted from 0), but its '
                f"space has {max(spec.sizes)}; give values of the space."
            )


def _count_lists(layout: Layout, observation: Any) -> int:
    """Return the rows of a batch of lists; 0 if the observation can be read as a single one."""
    try:
        layout.flatten(observation)
    except UserError as error:
        try:
            return len(next(iter(layout.flatten(observation, batched=True).values())))
        except (KeyError, IndexError, TypeError, ValueError, UserError):
            raise error from None
    return 0
