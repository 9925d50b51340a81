"""Sequences of recorded and labelled steps: what follows what, where the hidden state is reset, which steps count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.batch import Batch
from ludus.core.dataset import Dataset, RecordedEpisode
from ludus.experience.aggregate import AggregateSequences
from ludus.experience.recorded import RecordedSequences
from ludus.experience.sequences import SequenceShape

CPU = torch.device("cpu")


def dataset_of(lengths: list[int]) -> Dataset:
    """Step t of episode e is seen as 100 e + t, acted on with that number + 0.5, and rewarded by it."""
    episodes = []
    for number, length in enumerate(lengths):
        seen = 100.0 * number + np.arange(length + 1, dtype=np.float32)
        acted, ended = {"a": seen[:-1, None] + 0.5}, number % 2 == 1
        episodes.append(RecordedEpisode({"x": seen}, acted, seen[:-1], ended, not ended))
    return Dataset(tuple(episodes), "made up")


def same(actions: Any) -> Any:
    return actions


def check(batch: Batch, lengths: list[int], burn_in: int) -> None:
    """Walk along every sequence."""
    seen, time = batch.observation["x"], len(batch.reward)
    for column in range(seen.shape[1]):
        reset, known = 0, False  # since when, and whether since the start of an episode
        for t in range(time + 1):
            episode, step = divmod(int(seen[t, column]), 100)
            last = step == lengths[episode]
            if batch.first[t, column]:
                reset, known = t, step == 0
            else:
                assert seen[t, column] == seen[t - 1, column] + 1
            assert batch.first[t, column] == (t == 0 or step == 0 or bool(batch.first[t, column] and not known))
            if t == time:
                break
            assert batch.real[t, column] == (not last and (known or t - reset >= burn_in))
            assert batch.action["a"][t, column, 0] == seen[t, column] + (-0.5 if last else 0.5)
            assert batch.reward[t, column] == (0 if last else seen[t, column])
            ended = step == lengths[episode] - 1
            assert batch.terminated[t, column] == (ended and episode % 2 == 1)
            assert batch.truncated[t, column] == (ended and episode % 2 == 0)
            assert batch.discount[t, column] == (0 if ended and episode % 2 == 1 else torch.tensor(0.9))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 6), st.integers(0, 1_000))
def test_recorded_episodes(lengths: list[int], steps: int, burn_in: int, seed: int) -> None:
    shape = SequenceShape(steps, burn_in, 8)
    cache = RecordedSequences(dataset_of(lengths), same, shape, 0.9, CPU)  # type: ignore[arg-type]
    cache.generator.manual_seed(seed)
    batch = cache.draw()
    assert batch.first.shape == (steps + burn_in + 1, 8)
    check(batch, lengths, burn_in)


def test_every_step_is_drawn_alike() -> None:
    shape = SequenceShape(4, 0, 4_000)
    cache = RecordedSequences(dataset_of([3, 9, 2]), same, shape, 0.9, CPU)  # type: ignore[arg-type]
    batch = cache.draw()
    counts = Counter(batch.observation["x"][:-1][batch.real].tolist())
    assert len(counts) == 14
    assert max(counts.values()) < 1.2 * min(counts.values())


def labelled(
    lengths: list[int], rows: int, capacity: int, rollouts: list[int], steps: int, burn_in: int
) -> AggregateSequences:
    """A cache with a dataset, and rollouts in which all rows play an episode of 100 · (episodes + row) + step."""
    shape = SequenceShape(steps, burn_in, 16)
    options: dict[str, Any] = {"capacity": capacity, "updates": 1, "shape": shape, "step_bytes": 8}
    cache = AggregateSequences(4, rows, 0.9, CPU, False, **options)
    if lengths:
        cache.add_dataset(dataset_of(lengths), same)  # type: ignore[arg-type]
    start = 0
    for length in rollouts:
        time = torch.arange(start, start + length + 1)
        seen = (100.0 * (len(lengths) + torch.arange(rows)) + time[:, None]).float()  # [T+1, B]
        no, first = torch.zeros(length, rows, dtype=torch.bool), (time == 0)[:, None].expand(-1, rows)
        empty: dict[str, Any] = {"action": {}, "weight": seen, "discount": seen, "experience": {}}
        rollout = Batch({"x": seen}, first, reward=seen[:-1], terminated=no, truncated=no, real=~no, **empty)
        cache._add(cache._labelled(rollout, {"a": seen[:-1, :, None] + 0.5}))
        start += length
    return cache


@given(st.integers(1, 3), st.integers(2, 8), st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 4))
def test_labelled_rollouts_continue_each_other(rows: int, most: int, rollouts: list[int], burn_in: int) -> None:
    """Also after the ring has wrapped, where the oldest steps are overwritten."""
    steps = 2
    cache = labelled([], rows, max(most, steps + burn_in) * rows, rollouts, steps, burn_in)
    for _ in range(3):
        batch = cache._draw()
        check(batch, [1_000] * rows, burn_in)
    newest = sum(rollouts) - 1
    kept = {float(x) % 100 for x in cache._steps["observation/x"][: cache._kept].flatten()}
    assert kept == set(map(float, range(newest - len(kept) + 1, newest + 1)))
    assert cache.size == rows * len(kept)


def test_recorded_episodes_come_before_the_rollouts() -> None:
    lengths, rows = [5, 4, 6], 2
    cache = labelled(lengths, rows, 1_000, [4, 4], 3, 2)
    assert cache.size == 15 + 16
    for _ in range(20):
        check(cache._draw(), lengths + [1_000] * rows, 2)
    again = labelled([], rows, 1_000, [4], 3, 2)
    again.load_state_dict(cache.state_dict())
    first, other = cache._draw(), again._draw()
    assert torch.equal(first.observation["x"], other.observation["x"])
