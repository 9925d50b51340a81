"""The ops of one observation on the device, made from ``Spec.ops``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ludus.core.calls import parse_call
from ludus.core.errors import UserError
from ludus.core.spec import Spec, Specs, axes_problem
from ludus.preprocess.config import DEVICE_OPS, SETTING, NamedOp
from ludus.preprocess.ops import Concat, Drop, Op, Rename
from ludus.preprocess.pipeline import make_op


class Chain(NamedTuple):
    """Ops in order, and the spec and the name of their result."""

    ops: list[Op]
    output: Spec
    name: str  # empty: networks do not see it
    joined: bool  # with others of this name
    padding: int  # entities appended to a list


def make_chain(name: str, spec: Spec) -> Chain:
    """Make the ops that the settings give for an observation."""
    ops: list[Op] = []
    padding = 0
    output, result = replace(spec, ops=()), name
    for text in spec.ops:
        op: Op = make_op(NamedOp(name, parse_call(text, SETTING), text), name, output, DEVICE_OPS)
        output, padding = result_spec(output, op.output), padding + op.padding
        if isinstance(op, Rename):
            result = op.to_name
        elif isinstance(op, Drop):
            result = ""
        else:
            ops.append(op)
    joined = bool(spec.ops) and isinstance(op, Concat)
    return Chain(ops, output, result, joined, padding if output.axes == "entities" else 0)


def result_spec(before: Spec, output: Spec) -> Spec:
    """Return the output of an op with the default axes where the op changed rank or kind."""
    changed = len(output.shape) != len(before.shape) or (output.axes and axes_problem(output, output.axes))
    return replace(output, axes=None) if changed else output


def make_chains(specs: Specs) -> dict[str, Chain]:
    """Make the ops of all observations that are not dropped, by name."""
    chains = {name: make_chain(name, spec) for name, spec in specs.items()}
    kept = {name: chain for name, chain in chains.items() if chain.name}
    if chains and not kept:
        raise UserError(f"{SETTING} drops every observation, so networks would have no input; keep one.")
    _check_names(kept)
    return kept


def _check_names(chains: Mapping[str, Chain]) -> None:
    """Refuse two results of one name, unless vectors of one kind are joined."""
    seen: dict[str, str] = {}
    for name, chain in chains.items():
        other = seen.setdefault(chain.name, name)
        if other == name:
            continue
        if not (chain.joined and chains[other].joined):
            raise UserError(
                f'{SETTING} gives two observations, "{other}" and "{name}", the name "{chain.name}"; choose another '
                "name, or join them with concat."
            )
        if chain.output.kind != chains[other].output.kind:
            raise UserError(
                f'{SETTING} joins "{other}" ({chains[other].output.kind}) and "{name}" ({chain.output.kind}), but '
                "concat takes observations of one kind; networks join the others themselves."
            )
