"""Cut the steps of one environment into episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ludus.core.dataset import RecordedEpisode
from ludus.core.errors import UserError

Array = NDArray[Any]


class RowSteps(NamedTuple):
    """Consecutive steps of one environment, as in ``EnvStep``: step t has the transition that led to it.

    ``action[t]`` was taken at ``observation[t]``. ``final`` are the last observations of episodes that were reset in
    the same step, where the environment gives them.
    """

    observation: Mapping[str, Array]  # [T, …]
    action: Mapping[str, Array]  # [T, …]; the last is not used
    reward: Array  # [T]
    terminated: Array  # [T]
    truncated: Array  # [T]
    first: Array  # [T]
    real: Array  # [T]
    final: Mapping[str, Array] | None = None  # [T, …]


def cut_into_episodes(steps: RowSteps) -> Iterator[RecordedEpisode]:
    """Yield the episodes, of which the first and the last may be parts; no episode crosses a reset."""
    ended = steps.terminated | steps.truncated
    start = 0  # of the running episode; -1 between an ending and the reset
    for t in range(1, len(steps.reward)):
        if not steps.real[t]:  # a reset: of an episode that is over, or was lost
            if 0 <= start < t - 1:
                yield _cut(steps, start, t - 1, over=False)
            start = t
        elif ended[t]:
            yield _cut(steps, start, t, over=True)
            start = t if steps.first[t] else -1
    if 0 <= start < len(steps.reward) - 1:
        yield _cut(steps, start, len(steps.reward) - 1, over=False)


def _cut(steps: RowSteps, start: int, end: int, over: bool) -> RecordedEpisode:
    """Return the transitions from step ``start`` to step ``end``."""
    observation = {name: x[start : end + 1].copy() for name, x in steps.observation.items()}
    if over and steps.first[end]:  # observation[end] is that of the next episode
        if steps.final is None:
            raise UserError(
                "The environment resets episodes in the same step and does not give their last observations, so its "
                "episodes cannot be recorded."
            )
        for name, x in steps.final.items():
            observation[name][-1] = x[end]
    return RecordedEpisode(
        observation,
        {name: x[start:end].copy() for name, x in steps.action.items()},
        steps.reward[start + 1 : end + 1].astype(np.float32),
        terminated=over and bool(steps.terminated[end]),
        truncated=over and bool(steps.truncated[end]),
    )
