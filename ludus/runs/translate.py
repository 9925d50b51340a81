"""Translate observations and actions between an environment and a loaded policy."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs
from ludus.core.step import EnvStep
from ludus.core.types import Tensors
from ludus.environments.preprocess import REWARD, PreviousStep, part_of, replace_part
from ludus.environments.spaces import Arrays, Layout
from ludus.managers.base import BatchManager
from ludus.preprocess.frame_stack import FrameStack


class Translator:
    """Converts between values of an environment's spaces and named arrays ``[B, …]``, as its manager does.

    It also does what the ops of ``preprocess.observation`` do in the environment's process and in the manager: it
    processes images, adds the previous action and reward, and stacks frames. Actions and frames are kept between calls.
    """

    def __init__(self, manager: BatchManager) -> None:
        self._manager, self._name, self._specs = manager, manager.name, manager.reader.specs
        self._previous = manager.previous_step
        self._frames = None if manager.frame_stack is None else FrameStack(manager.frame_stack.ops)
        self._last: Arrays = {}  # [B, …]: the previous step as observations; empty if there is none

    def reset(self) -> None:
        """Forget earlier frames and actions."""
        self._last = {}
        if self._frames is not None:
            self._frames.stacks = {}

    def read_step(
        self,
        observation: Any,
        info: Mapping[str, Any],
        first: Any = None,
        reward: Any = None,
        stateless: bool = False,
        keep: bool = False,
    ) -> tuple[EnvStep, bool]:
        """Return an observation of one environment, or of a batch, as a step, and whether it was a batch.

        Rows that are ``first`` begin an episode; ``reward`` is that of the last step. ``keep``: keep the stacks of
        frames for the next call. If it is ``stateless``, nothing is known of earlier steps: the observation has whole
        stacks and the previous step.
        """
        observation = self._complete(observation, first, reward, stateless)
        whole = self._holds_stacks(observation, stateless)
        arrays, batched = self._parse(observation, info, self._manager.observation if whole else self._specs)
        rows = len(next(iter(arrays.values())))
        begins, no = torch.from_numpy(_per_row(first, rows)), torch.zeros(rows, dtype=torch.bool)
        tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
        step = EnvStep(tensors, torch.zeros(rows), no, no, begins, ~begins)
        if self._frames is None or whole:
            return step, batched
        kept = self._frames.stacks
        self._frames.stacks = dict(kept) if all(len(x) == rows for x in kept.values()) else {}
        step = self._frames.push(step)
        if not keep:
            self._frames.stacks = kept
        return step, batched

    def format_actions(self, actions: Tensors, batched: bool, keep: bool = False) -> Any:
        """Return policy-space actions ``[B, …]`` as the environment takes them: a batch, or the only row.

        ``keep`` them as the previous actions of the next observation.
        """
        manager = self._manager
        arrays = manager.preprocess_actions({name: x.cpu().numpy() for name, x in actions.items()})
        if keep and self._previous is not None:
            rows = range(len(next(iter(arrays.values()))))
            encoded = [self._previous.encode({name: x[i] for name, x in arrays.items()}, 0.0) for i in rows]
            self._last = {name: np.stack([row[name] for row in encoded]) for name in self._previous.zeros}
        return manager.layout.unflatten(arrays) if batched else manager.layout.unflatten_row(arrays, 0)

    def nest_actions(self, values: Mapping[str, Any]) -> Any:
        """Nest values by action name like the environment's action space; return a single one alone."""
        return self._manager.layout.nest(values)

    def _complete(self, observation: Any, first: Any, reward: Any, stateless: bool) -> Any:
        """Process raw images, and add the previous step unless it is given."""
        previous = self._previous
        if previous is None:
            return self._process_images(observation)
        inner, added = previous.split(observation)
        inner = self._process_images(inner)
        if added:
            return previous.join(inner, added)
        if stateless:
            raise UserError(
                f"{self._name}: the policy observes its previous step; with state=…, give {', '.join(previous.zeros)} "
                "by name too, as policy.environment() does."
            )
        rows = self._count_rows(previous.join(inner, previous.zeros), self._specs)
        last = self._last_step(previous, max(rows, 1), first, reward)
        return previous.join(inner, last if rows else {name: x[0] for name, x in last.items()})

    def _last_step(self, previous: PreviousStep, rows: int, first: Any, reward: Any) -> Arrays:
        """Return the previous step as observations ``[rows, …]``: zeros where an episode begins."""
        known = len(next(iter(self._last.values()), ())) == rows
        last = dict(self._last) if known else {name: np.stack([x] * rows) for name, x in previous.zeros.items()}
        begins = _per_row(first, rows) | (not known)
        if REWARD in last and not begins.all():
            if reward is None:
                raise UserError(
                    f"{self._name}: the policy observes the previous reward; give it, as in policy.act(observation, "
                    "reward=reward), or first=True where an episode begins."
                )
            last[REWARD] = np.broadcast_to(np.asarray(reward, np.float32), (rows,))
        return {
            name: np.where(begins.reshape(-1, *[1] * (x.ndim - 1)), 0, x).astype(x.dtype) for name, x in last.items()
        }

    def _process_images(self, observation: Any) -> Any:
        """Apply the ops on images of ``preprocess.observation`` where they have not been applied, as by a wrapper."""
        if (ops := self._manager.image_ops) is None:
            return observation
        for name, path in ops.paths.items():
            try:
                x = np.asarray(part_of(observation, path))
            except (KeyError, IndexError, TypeError):
                return observation  # refused by _parse
            (shape, dtype), spec = ops.raw[name], self._specs[name]
            done = x.shape[-len(spec.shape) :] == spec.shape and (shape != spec.shape or x.dtype == spec.dtype)
            if done or x.shape[-len(shape) :] != shape or x.ndim - len(shape) not in (0, 1):
                continue
            rows, batched = (x, True) if x.ndim > len(shape) else (x[None], False)
            y = [ops.process(name, row) for row in rows.astype(dtype, copy=False)]
            observation = replace_part(observation, path, np.stack(y) if batched else y[0])
        return observation

    def _holds_stacks(self, observation: Any, stateless: bool) -> bool:
        """Return whether the observation has whole stacks of frames: a batch of them, or one if ``stateless``."""
        if self._frames is None:
            return False
        name = next(iter(self._frames.ops))
        shape, path = self._specs[name].shape, self._manager.reader.layout.leaves[name].path
        try:
            more = np.ndim(part_of(observation, path)) - len(shape)
        except (KeyError, IndexError, TypeError):
            return False  # refused by _parse
        if stateless and more == 0:
            raise UserError(
                f'{self._name}: the observation "{name}" has shape {shape}, one frame of a stack; with state=…, give '
                f"the whole stack, of shape {self._manager.observation[name].shape}."
            )
        return more == 2 or (stateless and more == 1)

    def _parse(self, observation: Any, info: Mapping[str, Any], specs: Specs) -> tuple[Arrays, bool]:
        """Return an observation of one environment or of a batch as arrays ``[B, …]``, and whether it was a batch."""
        reader = self._manager.reader
        rows = self._count_rows(observation, specs)
        batched = rows > 0
        if reader.mask_in_info and info.get(reader.mask_key) is None:
            raise UserError(
                f'{self._name} gives the action mask "{reader.mask_key}" in info: give it too, as in '
                "policy.act(observation, info)."
            )
        if reader.masks and not reader.mask_in_info and observation.get(reader.mask_key) is None:
            raise UserError(f'{self._name}: the observation lacks the action mask "{reader.mask_key}"; give it too.')
        arrays = reader.read(observation, info, (rows,) if rows else ())
        for name, x in arrays.items():
            spec = specs[name]
            if x.shape[batched:] != spec.shape:
                raise UserError(
                    f'{self._name}: the observation "{name}" has shape {x.shape}; give {spec.shape}, or a batch of '
                    "such."
                )
            self._check_choices(name, x, spec)
            self._check_integers(name, x, spec)
            typed = x.astype(spec.dtype, copy=False)
            arrays[name] = np.ascontiguousarray(typed if batched else typed[None])
            if np.issubdtype(typed.dtype, np.floating) and not np.isfinite(typed).all():
                raise UserError(
                    f'The observation "{name}" has a NaN or Inf at {np.argwhere(~np.isfinite(typed))[0].tolist()}: fix '
                    "the environment or what computes the observation."
                )
        return arrays, batched

    def _count_rows(self, observation: Any, specs: Specs) -> int:
        """Return the number of rows of a batch of observations; 0 for a single observation."""
        layout = self._manager.reader.layout
        added: Container[str] = () if self._previous is None else self._previous.zeros
        try:
            if layout.padded and all(name in added for name in layout.leaves):  # a list of rows or of elements
                return _count_lists(layout, observation, added)
            leaves = layout.flatten_leaves(observation)
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{self._name}: the observation is a {type(observation).__name__} that lacks a part of "
                f"{', '.join(layout.specs)}; give it as the environment does."
            ) from error
        name = next(name for name in leaves if name not in added)
        return len(leaves[name]) if leaves[name].ndim == len(specs[name].shape) + 1 else 0

    def _check_integers(self, name: str, x: NDArray[Any], spec: Spec) -> None:
        """Refuse numbers that the integer type of an observation cannot hold, such as an image divided by 255."""
        wanted = np.dtype(spec.dtype)
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

    def _check_choices(self, name: str, x: NDArray[Any], spec: Spec) -> None:
        """Refuse choices outside of the space, which an embedding does not have."""
        if spec.kind != "categorical":
            return
        wrong = (x < 0) | (x >= np.reshape(spec.sizes, spec.shape))
        if wrong.any():
            raise UserError(
                f'{self._name}: the observation "{name}" has the choice {x[wrong].flat[0]} (counted from 0), but its '
                f"space has {max(spec.sizes)}; give values of the space."
            )


def _per_row(first: Any, rows: int) -> NDArray[np.bool_]:
    """Return a bool for each row, given one for all, one for each, or None for False."""
    return np.broadcast_to(np.asarray(bool(first) if np.ndim(first) == 0 else first, np.bool_), (rows,)).copy()


def _count_lists(layout: Layout, observation: Any, added: Container[str]) -> int:
    """Return the rows of a batch of lists; 0 if the observation can be read as a single one."""
    try:
        layout.flatten(observation)
    except UserError as error:
        try:
            arrays = layout.flatten(observation, batched=True)
            return len(next(x for name, x in arrays.items() if name not in added))
        except (KeyError, IndexError, TypeError, ValueError, UserError):
            raise error from None
    return 0
