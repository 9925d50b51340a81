"""Steps are cut into episodes at their ends, whichever way environments reset, and no episode crosses a reset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ludus.core.dataset import RecordedEpisode
from ludus.core.errors import UserError
from ludus.data.episodes import RowSteps, cut_into_episodes


def cut(kinds: str, final: bool = False) -> list[RecordedEpisode]:
    """One step per letter: ``s`` a step, ``t`` terminated, ``c`` truncated, ``f`` a reset, ``T`` and ``C`` ends with a
    reset in the same step. The observation of step i is i, the action 10 + i, the reward 100 + i, a final −i.
    """
    number = np.arange(len(kinds))
    of = np.array(list(kinds))
    steps = RowSteps(
        observation={"x": number},
        action={"a": 10 + number},
        reward=100.0 + number,
        terminated=np.isin(of, ["t", "T"]),
        truncated=np.isin(of, ["c", "C"]),
        first=np.isin(of, ["f", "T", "C"]),
        real=of != "f",
        final={"x": -number} if final else None,
    )
    return list(cut_into_episodes(steps))


def summary(episode: RecordedEpisode) -> tuple[Any, ...]:
    observation, action = episode.observation["x"].tolist(), episode.action["a"].tolist()
    assert len(observation) == len(action) + 1 == len(episode.reward) + 1
    assert action == [10 + x for x in observation[:-1]]
    return observation, episode.terminated, episode.truncated


def test_next_step_resets() -> None:
    assert [summary(x) for x in cut("fsstfscfs")] == [
        ([0, 1, 2, 3], True, False),
        ([4, 5, 6], False, True),
        ([7, 8], False, False),
    ]
    assert cut("fsst")[0].reward.tolist() == [101, 102, 103]


def test_same_step_resets() -> None:
    assert [summary(x) for x in cut("fsTsCs", final=True)] == [
        ([0, 1, -2], True, False),
        ([2, 3, -4], False, True),
        ([4, 5], False, False),
    ]
    with pytest.raises(UserError, match="last observations"):
        cut("fsTs")


def test_a_lost_episode_ends_before_its_reset() -> None:
    assert [summary(x) for x in cut("fssfst")] == [([0, 1, 2], False, False), ([3, 4, 5], True, False)]


def test_parts_without_a_step_are_left_out() -> None:
    assert cut("f") == []
    assert cut("ff") == []
    assert [summary(x) for x in cut("fftff")] == [([1, 2], True, False)]


def test_the_first_part_may_begin_within_an_episode() -> None:
    assert [summary(x) for x in cut("sstfs")] == [([0, 1, 2], True, False), ([3, 4], False, False)]
