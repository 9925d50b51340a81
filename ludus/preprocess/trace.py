"""Trace ``preprocess.observation``: what every op makes of an observation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ludus.core.spec import Spec, Specs
from ludus.preprocess.chain import result_spec
from ludus.preprocess.pipeline import STAGES, assign_ops, make_op, stage_of

PLACES = ("environment", "manager", "device")  # where the ops of each stage run


class TracedOp(NamedTuple):
    """An op, where it runs, and the spec of its result."""

    text: str
    place: str
    output: Spec


def trace_ops(observation: Specs, pipeline: Iterable[str]) -> dict[str, list[TracedOp]]:
    """Return the ops of each observation in order; ``observation`` are the specs before the first op."""
    traced: dict[str, list[TracedOp]] = {}
    for name, ops in assign_ops(observation, pipeline).items():
        spec, traced[name] = observation[name], []
        for op in ops:
            stage = stage_of(op)
            spec = result_spec(spec, make_op(op, name, spec, STAGES[stage]).output)
            traced[name].append(TracedOp(op.text, PLACES[stage], spec))
    return traced
