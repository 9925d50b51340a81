"""Freeze parameters and running statistics by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ludus.core.agent import Agent
from ludus.core.errors import UserError
from ludus.preprocess.normalization import RunningStatistics


def freeze(agent: Agent, patterns: Sequence[str]) -> None:
    """Exclude the matching parameters from learning, and stop the matching running statistics of normalizers.

    Frozen parameters get no gradient and are in no optimizer group. A module whose parameters are all frozen stays in
    evaluation mode, so that its batch statistics do not change either.
    """
    if not patterns:
        return
    groups = list(agent.parameter_groups())
    parameters = dict(agent.named_parameters())
    statistics = {name: module for name, module in agent.named_modules() if isinstance(module, RunningStatistics)}
    for pattern in patterns:
        frozen = [p for name, p in parameters.items() if fnmatchcase(name, pattern)]
        stopped = [
            x for name, x in statistics.items() if fnmatchcase(name, pattern) or fnmatchcase(f"{name}.", pattern)
        ]
        if not frozen and not stopped:
            raise UserError(
                f'freeze has "{pattern}", which matches no parameter and no normalizer; they are named as in '
                f"{', '.join([*parameters][:1] + [*statistics][:1])}; see `ludus show network`."
            )
        for p in frozen:
            p.requires_grad_(False)
        for module in stopped:
            module.frozen = True
    left = agent.parameter_groups()
    if empty := [name for name in groups if name not in left or not left[name].parameters]:
        raise UserError(
            f"freeze is {' '.join(patterns)}, which leaves nothing to learn in the parameter group {empty[0]} of "
            f"{type(agent).__name__}; freeze less."
        )
    if any(not p.requires_grad for group in left.values() for p in group.parameters):
        raise UserError(
            f"freeze is {' '.join(patterns)}, but parameter_groups of {type(agent).__name__} returns frozen parameters "
            "too; make its groups by self.make_group, which leaves them out."
        )
