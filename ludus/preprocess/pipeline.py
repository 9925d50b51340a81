"""Make the ops of ``preprocess.observation`` for specs of observations. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ludus.core.calls import check_arguments
from ludus.core.errors import UserError
from ludus.core.imports import resolve
from ludus.core.spec import Spec, Specs
from ludus.preprocess.config import ENVIRONMENT_OPS, PREVIOUS, SETTING, NamedOp, observation_ops


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


def with_device_ops(observation: Specs, pipeline: Iterable[str]) -> Specs:
    """Return the specs with the ops that run on the device; refuse ops of the environment's process after them."""
    specs = dict(observation)
    sources = {name: name for name, spec in specs.items() if spec.masks is None}  # name after renaming → name
    for op in observation_ops(pipeline):
        if op.call.name in PREVIOUS:
            continue
        for name in op.select(sources):
            spec = specs[sources[name]]
            if op.call.name in ENVIRONMENT_OPS:
                if spec.ops:
                    raise UserError(
                        f'{SETTING} has "{op.text}" after "{spec.ops[-1]}" for observation "{name}", but '
                        f"{op.call.name} runs in the environment's process, before all ops on the device; put it first."
                    )
                continue
            specs[sources[name]] = replace(spec, ops=(*spec.ops, op.text))
            if op.call.name in ("rename", "concat", "drop"):
                source = sources.pop(name)
                if op.call.name == "rename":
                    sources[str(op.call.arguments.get("to"))] = source
    return specs
