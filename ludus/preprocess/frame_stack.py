"""Stack the last observations of each row, where the manager has them: on the host or on the environments' device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs
from ludus.core.step import EnvStep
from ludus.core.types import Tensors
from ludus.preprocess.config import SETTING, STACK_OPS
from ludus.preprocess.pipeline import assign_ops, make_op

ALL_ROWS = slice(None)


class Stack:
    """Stack the last ``n`` observations, the oldest first; an episode starts with ``n`` times its first one."""

    def __init__(self, spec: Spec, *, n: int) -> None:
        if isinstance(n, bool) or n < 2:
            raise ValueError(f"n is {n}, but must be a whole number above 1")
        if spec.kind != "continuous":
            raise ValueError("it stacks numbers")
        self.frames = n
        low, high = _repeated(spec.low, n), _repeated(spec.high, n)
        self.output = replace(spec, shape=(n, *spec.shape), low=low, high=high, stack=n, axes=None)

    def begin(self, x: Tensor) -> Tensor:
        """Return the stacks ``[B, n, …]`` of first observations ``[B, …]``."""
        return torch.stack([x] * self.frames, 1)

    def push(self, stack: Tensor, x: Tensor) -> Tensor:
        """Return stacks with the next observations."""
        return torch.cat([stack[:, 1:], x.unsqueeze(1)], 1)


class FrameStack:
    """The stacks of some observations of all rows, by name."""

    def __init__(self, ops: Mapping[str, Stack]) -> None:
        self.ops = dict(ops)
        self.stacks: Tensors = {}  # [B, n, …]; empty before the first step

    def push(self, step: EnvStep, rows: slice = ALL_ROWS) -> EnvStep:
        """Return the step of some rows with stacks in place of frames; the first step must be one of all rows.

        The final observation of an episode that was reset in the same step is stacked on the frames before it, and the
        first one of the next episode starts a new stack.
        """
        observation = dict(step.observation)
        final = None if step.final is None else dict(step.final)
        for name, op in self.ops.items():
            x = step.observation[name]
            if name not in self.stacks:
                self.stacks[name] = observation[name] = op.begin(x)
                continue
            before = self.stacks[name][rows]
            if final is not None:
                final[name] = op.push(before, final[name])
            observation[name] = _begin_where(step.first, x, op.push(before, x))
            if len(x) == len(self.stacks[name]):
                self.stacks[name] = observation[name]
            else:
                self.stacks[name][rows] = observation[name]
        return step._replace(observation=observation, final=final)

    def last(self, step: EnvStep) -> EnvStep:
        """Return the last step of all rows with its stacks."""
        return step._replace(observation=step.observation | self.stacks)

    def load(self, stacks: Tensors, step: EnvStep) -> None:
        """Load the stacks of a checkpoint; rows whose last step is the first of an episode start new ones."""
        last = {name: step.observation[name] for name in self.ops}
        self.stacks = {name: _begin_where(step.first, x, stacks[name].to(x.device)) for name, x in last.items()}


def make_frame_stack(observation: Specs, pipeline: Iterable[str]) -> tuple[Specs, FrameStack | None]:
    """Return the specs of observations with those that ``preprocess.observation`` stacks, and their stacks if any."""
    specs, made = dict(observation), {}
    lists = [spec.masks for spec in observation.values() if spec.masks is not None]
    for name, ops in assign_ops(observation, pipeline).items():
        for op in ops:
            if op.call.name not in STACK_OPS:
                continue
            if name in lists:
                raise UserError(
                    f'{SETTING} has "{op.text}" for observation "{name}", a list of variable length, which cannot be '
                    "stacked; name the observations to stack, as in camera: stack(n=4)."
                )
            made[name] = make_op(op, name, specs[name], STACK_OPS)
            specs[name] = made[name].output
    return specs, FrameStack(made) if made else None


def _begin_where(first: Tensor, x: Tensor, stack: Tensor) -> Tensor:
    """Return stacks ``[B, n, …]`` of which those of rows that are ``first`` hold the frame ``x`` alone."""
    return torch.where(first.view(-1, *[1] * x.dim()), x.unsqueeze(1), stack)


def _repeated(bound: Any, n: int) -> Any:
    return tuple(np.tile(bound, n).tolist()) if isinstance(bound, tuple) else bound
