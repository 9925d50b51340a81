"""Recorded episodes are drawn from a replay as they were recorded, alone and beside new experience."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_data import make_up
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.dataset import Dataset
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec, Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.experience.config import ReplayConfig
from ludus.experience.recorded_replay import MixedReplay, RecordedReplay, recorded_part

GAMMA, STACK = 0.5, 3  # powers of 0.5 and whole rewards add up exactly, in any order
CPU = torch.device("cpu")
X: Specs = {"x": Spec((2,), "float32")}
FRAMES: Specs = X | {"frames": Spec((STACK,), "int32", stack=STACK)}
A: Specs = {"a": Spec((1,), "float32", low=-1e6, high=1e6)}
LENGTHS = [3, 1, 5, 2]
pytestmark = pytest.mark.usefixtures("each_way")


def recorded(
    lengths: list[int], seed: int = 0, specs: Specs = X, window: bool = False, **changes: Any
) -> tuple[RecordedReplay, Dataset]:
    dataset = Dataset(make_up(np.random.default_rng(seed), lengths, STACK if "frames" in specs else 0), "made up")
    config = ReplayConfig(**({"batch_size": 16} | changes))
    replay = RecordedReplay(config, dataset, dict, GAMMA, specs, A, CPU, window)
    replay.generator.manual_seed(seed)
    return replay, dataset


def check(batch: Batch, dataset: Dataset, n: int) -> set[tuple[int, int]]:
    """Compare each transition with the episodes; return which were drawn."""
    drawn = set()
    for i in range(batch.reward.shape[1]):
        number, t = divmod(int(batch.observation["x"][0, i, 0]), 100)
        episode = dataset.episodes[number]
        steps = min(n, episode.length - t)
        ends = t + steps == episode.length
        for name, x in batch.observation.items():
            assert x[:, i].tolist() == episode.observation[name][[t, t + steps]].tolist()
        assert batch.action["a"][0, i].tolist() == episode.action["a"][t].tolist()
        assert float(batch.reward[0, i]) == sum(GAMMA**k * episode.reward[t + k] for k in range(steps))
        assert bool(batch.terminated[0, i]) == (ends and episode.terminated)
        assert bool(batch.truncated[0, i]) == (ends and episode.truncated)
        assert float(batch.discount[0, i]) == (0 if ends and episode.terminated else GAMMA**steps)
        assert batch.first[0, i] == (t == 0)
        drawn.add((number, t))
    assert batch.real.all()
    assert (batch.weight == 1).all()
    return drawn


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    n=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    specs=st.sampled_from([X, FRAMES]),
    prioritized=st.booleans(),
)
def test_every_transition_is_drawn_as_recorded(
    lengths: list[int], n: int, seed: int, specs: Specs, prioritized: bool
) -> None:
    options = {"n_step": n, "prioritized": prioritized, "importance_exponent": 0.0}
    replay, dataset = recorded(lengths, seed, specs, **options)
    every = {(number, t) for number, length in enumerate(lengths) for t in range(length)}
    assert replay.size == len(every)
    drawn: set[tuple[int, int]] = set()
    for _ in range(200):
        drawn |= check(replay.read(), dataset, n)
        if drawn == every:
            return
    raise AssertionError(f"never drawn: {every - drawn}")


@pytest.mark.parametrize("specs", [X, FRAMES])
def test_draws_are_the_same_however_many_episodes_are_written_at_once(
    specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"prioritized": True, "n_step": 2, "window": True}
    draws = []
    for steps in (1, 4, 1000):
        monkeypatch.setattr("ludus.experience.recorded_replay.CHUNK", steps)
        batch = recorded(LENGTHS, 0, specs, **options)[0].read()
        draws.append([batch.index, batch.reward, *batch.action.values(), *batch.window.values()])
    for other in draws[1:]:
        for x, y in zip(draws[0], other, strict=True):
            assert torch.equal(x, y)


def test_it_can_be_read_as_often_as_granted() -> None:
    replay, _ = recorded(LENGTHS)
    assert not replay.ready()
    replay.grant(2)
    for _ in range(2):
        assert replay.ready()
        replay.read()
    assert not replay.ready()


def test_fewer_transitions_than_a_batch() -> None:
    replay, dataset = recorded([2], batch_size=64)
    assert check(replay.read(), dataset, 1) == {(0, 0), (0, 1)}


def test_intermediate_states_of_returns_do_not_cross_episodes() -> None:
    replay, dataset = recorded(LENGTHS, window=True, n_step=3)
    batch = replay.read()
    for i in range(16):
        number, t = divmod(int(batch.observation["x"][0, i, 0]), 100)
        inside = min(3, dataset.episodes[number].length - t) - 1
        assert batch.window["discount"][:, i].tolist() == [GAMMA**k if k <= inside else 0.0 for k in (1, 2)]


def test_statistics_get_every_recorded_step_once() -> None:
    replay, dataset = recorded(LENGTHS)
    fresh, returns = replay.fresh(["x"], with_returns=True)
    before = np.concatenate([episode.observation["x"][:-1] for episode in dataset.episodes])
    assert fresh["x"].tolist() == before.tolist()
    expected = []
    for episode in dataset.episodes:
        total = 0.0
        for reward in episode.reward.tolist():
            total = reward + GAMMA * total
            expected.append(total)
    assert returns is not None
    assert returns.tolist() == expected
    assert not len(replay.fresh(["x"])[0]["x"])


def test_a_resumed_one_continues_with_the_same_draws_and_priorities() -> None:
    options: dict[str, Any] = {"prioritized": True, "n_step": 2}
    replay, _ = recorded(LENGTHS, **options)
    replay.grant(5)
    replay.fresh(["x"])
    for i in range(4):
        batch = replay.read()
        assert batch.index is not None
        replay.feedback(batch.index, torch.linspace(0, 1 + i, 16))
    again, _ = recorded(LENGTHS, **options)
    again.load_state_dict(replay.state_dict())
    assert again.ready()
    assert not len(again.fresh(["x"])[0]["x"])
    for _ in range(3):
        one, other = replay.read(), again.read()
        assert torch.equal(one.observation["x"], other.observation["x"])
        assert torch.equal(one.weight, other.weight)
    assert not again.ready()


class Live:
    """Writes the steps of one row, with observations from 10,000 on, to a replay."""

    def __init__(self, replay: MixedReplay) -> None:
        self.replay, self.time = replay, 0

    def write(self, steps: int) -> None:
        for _ in range(steps):
            no = torch.zeros(1, dtype=torch.bool)
            first = torch.tensor([self.time == 0])
            seen = {"x": torch.full((1, 2), 10_000.0 + self.time)}
            self.replay.env_write(EnvStep(seen, torch.ones(1), no, no, first, ~first), HiddenState())
            self.replay.agent_write(AgentStep({"a": torch.full((1, 1), float(self.time))}, {}, HiddenState()))
            self.time += 1


def mixed(part: int = 4, **changes: Any) -> tuple[MixedReplay, Dataset, Live]:
    config = ReplayConfig(**({"batch_size": 16, "warmup": 0, "replay": 500} | changes))
    held, dataset = recorded(LENGTHS, **({"batch_size": part} | changes))
    replay = MixedReplay(held, config, 1, GAMMA, X, CPU)
    replay.generator.manual_seed(3)
    return replay, dataset, Live(replay)


def columns(batch: Batch, rows: slice) -> Batch:
    """Some columns of a batch."""

    def part(x: Tensor) -> Tensor:
        return x[:, rows]

    return replace(batch._map(part), index=None)


@pytest.mark.parametrize("n", [1, 3])
def test_a_batch_has_new_and_recorded_transitions(n: int) -> None:
    replay, dataset, live = mixed(n_step=n)
    live.write(11)
    assert not replay.ready()  # a full batch of new ones takes 12 transitions
    live.write(9)
    assert replay.ready()
    batch = replay.read()
    assert batch.reward.shape == (1, 16)
    assert (batch.observation["x"][0, :12, 0] >= 10_000).all()
    check(columns(batch, slice(12, 16)), dataset, n)
    assert replay.metrics()["replay/recorded"] == sum(LENGTHS)


def test_each_part_has_its_priorities() -> None:
    replay, _, live = mixed(part=8, prioritized=True, priority_exponent=1.0)
    live.write(40)
    for _ in range(40):
        batch = replay.read()
        x = batch.observation["x"][0, :, 0]
        assert batch.index is not None
        replay.feedback(batch.index, ((x == 10_005) | (x == 200)).float())  # of each part, one matters
    x = replay.read().observation["x"][0, :, 0]
    assert (x[:8] == 10_005).float().mean() > 0.8
    assert (x[8:] == 200).float().mean() > 0.8


def test_a_resumed_mixture_continues_with_the_same_draws() -> None:
    replay, _, live = mixed(prioritized=True)
    live.write(30)
    batch = replay.read()
    assert batch.index is not None
    replay.feedback(batch.index, torch.linspace(0, 2, 16))
    again = mixed(prioritized=True)[0]
    again.load_state_dict(replay.state_dict())
    for _ in range(2):
        one, other = replay.read(), again.read()
        assert torch.equal(one.observation["x"], other.observation["x"])
        assert torch.equal(one.weight, other.weight)


def test_statistics_of_a_mixture_get_the_recorded_steps_once() -> None:
    replay, _, live = mixed()
    live.write(3)
    assert len(replay.fresh(["x"])[0]["x"]) == sum(LENGTHS) + 2
    live.write(3)
    assert len(replay.fresh(["x"])[0]["x"]) == 3


@pytest.mark.parametrize(("batch_size", "share", "part"), [(256, 0.5, 128), (4, 0.01, 1), (4, 0.99, 3), (10, 0.25, 2)])
def test_the_share_of_a_batch(batch_size: int, share: float, part: int) -> None:
    assert recorded_part(batch_size, share) == part


def test_what_does_not_work_with_recorded_episodes() -> None:
    with pytest.raises(UserError, match=r"agent.sequence is 4, which does not work with recorded episodes"):
        recorded(LENGTHS, sequence=4)
    with pytest.raises(UserError, match=r"agent.hindsight is 0.8, which does not work with recorded episodes"):
        recorded(LENGTHS, hindsight=0.8)
    with pytest.raises(UserError, match=r"agent.batch_size is 1, so a batch cannot have new and recorded"):
        recorded_part(1, 0.5)
