from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.spec import Spec
from ludus.managers.history import MIN_CAPACITY, ActionHistory

SPECS = {"a": Spec((), "int64", "categorical", sizes=(1000,)), "b": Spec((2,), "float32")}


def step(number, rows):
    return {"a": np.full(rows, number) + np.arange(rows), "b": np.full((rows, 2), number, np.float32)}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 600), st.floats(0, 0.2), st.integers(0, 2**32 - 1), st.booleans())
def test_rows_have_the_actions_since_their_reset(rows, steps, rate, seed, reloaded):
    random = np.random.default_rng(seed)
    history, since = ActionHistory(SPECS, rows, max_steps=200), [0] * rows
    for number in range(steps):
        history.append(step(number, rows))
        begun = random.random(rows) < rate
        history.start(begun)
        since = [number + 1 if b else s for b, s in zip(begun, since, strict=True)]
        if reloaded and number == steps // 2:
            other = ActionHistory(SPECS, rows, max_steps=200)
            other.load([history.actions(row) for row in range(rows)])
            history = other
    for row in range(rows):
        found = history.actions(row)
        if steps - since[row] > 200:
            assert found is None
            continue
        assert found["a"].tolist() == [number + row for number in range(since[row], steps)]
        assert found["b"].tolist() == [[number] * 2 for number in range(since[row], steps)]


@pytest.mark.parametrize("length", [1, 10, 100])
def test_memory_follows_the_longest_running_episode(length):
    history = ActionHistory(SPECS, 2)
    for number in range(5000):
        history.append(step(number, 2))
        if number % length == 0:
            history.start(slice(None))
    assert history._capacity <= max(MIN_CAPACITY, 4 * length)


def test_too_long_episodes_hold_no_memory():
    history = ActionHistory(SPECS, 2, max_steps=100)
    for number in range(3000):
        history.append(step(number, 2))
        if number % 10 == 0:
            history.start(np.array([False, True]))
    assert history.actions(0) is None
    assert len(history.actions(1)["a"]) == 9
    assert history._capacity <= 512
    history.start(0)
    history.append(step(7, 2))
    assert history.actions(0)["a"].tolist() == [7]
