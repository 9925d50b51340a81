"""Make the ops of ``preprocess.observation`` for specs of observations. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ludus.core.calls import check_arguments
from ludus.core.errors import UserError
from ludus.core.imports import resolve
from ludus.core.spec import Spec, Specs
from ludus.preprocess.config import (
    DEVICE_OPS,
    ENVIRONMENT_OPS,
    PREVIOUS,
    SETTING,
    STACK_OPS,
    NamedOp,
    observation_ops,
)

STAGES = (ENVIRONMENT_OPS, STACK_OPS, DEVICE_OPS)  # in the order in which they are applied
WHERE = ("in the environment's process", "in the manager", "on the device")


def make_op(op: NamedOp, name: str, spec: Spec, table: Mapping[str, str], setting: str = SETTING) -> Any:
    """Make an op for an observation; a UserError names the observation, its shape and the op if it cannot be made.

    The constructor of an op takes a spec and keyword arguments, sets ``output``, the spec of its result, and raises a
    ValueError with the reason if it does not take this spec.
    """
    what = f'{setting} "{op.text}"'
    if op.call.name not in table:  # resolve would import a path, which the specs of an untrusted run may name
        raise UserError(f"{what} is not one of {', '.join(table)}.")
    kind = resolve(op.call.name, table, "op")
    check_arguments(kind, op.call, 1, what)
    try:
        return kind(spec, **op.call.arguments)
    except (TypeError, ValueError) as error:
        reason = str(error).partition("() ")[2] or str(error)  # a missing argument, without the constructor's name
        observation = f'observation "{name}", {spec.kind} {spec.dtype} of shape {spec.shape}'
        target = observation if setting == SETTING else name
        raise UserError(f"{what} cannot be applied to {target}: {reason}.") from error


def stage_of(op: NamedOp) -> int:
    """Return the index in ``STAGES`` of an op."""
    return next(i for i, table in enumerate(STAGES) if op.call.name in table)


def assign_ops(observation: Specs, pipeline: Iterable[str]) -> dict[str, list[NamedOp]]:
    """Return the ops of each observation, in order; after a rename, patterns match the new name.

    An op that comes after one of a later stage is refused, and so is a second stack.
    """
    ops = observation_ops(pipeline)
    added = [op.call.name for op in ops if op.call.name in PREVIOUS]  # outside of images and stacks
    assigned: dict[str, list[NamedOp]] = {name: [] for name, spec in observation.items() if spec.masks is None}
    sources = {name: name for name in assigned}  # current name → name of the observation
    for op in ops:
        if op.call.name in PREVIOUS:
            continue
        stage = stage_of(op)
        every = STAGES[stage] is DEVICE_OPS
        for name in op.select([name for name in sources if every or name.split("/")[0] not in added]):
            before = assigned[sources[name]]
            _check_order(name, before, op, stage)
            before.append(op)
            if op.call.name in ("rename", "concat", "drop"):
                source = sources.pop(name)
                if op.call.name == "rename":
                    sources[str(op.call.arguments.get("to"))] = source
    return assigned


def with_device_ops(observation: Specs, pipeline: Iterable[str]) -> Specs:
    """Return the specs with the ops that run on the device."""
    assigned = assign_ops(observation, pipeline)
    return {
        name: replace(spec, ops=tuple(op.text for op in assigned.get(name, ()) if op.call.name in DEVICE_OPS))
        for name, spec in observation.items()
    }


def _check_order(name: str, before: list[NamedOp], op: NamedOp, stage: int) -> None:
    last = stage_of(before[-1]) if before else 0
    if last > stage:
        raise UserError(
            f'{SETTING} has "{op.text}" after "{before[-1].text}" for observation "{name}", but {op.call.name} runs '
            f"{WHERE[stage]}, before what runs {WHERE[last]}; put it first."
        )
    if before and last == stage and STAGES[stage] is STACK_OPS:
        raise UserError(f'{SETTING} has two stacks for observation "{name}"; keep one of them.')
