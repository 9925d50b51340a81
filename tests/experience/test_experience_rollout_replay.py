"""RolloutReplay: fresh rollouts are read as written, replayed batches contain columns of past ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec
from ludus.core.step import AgentStep, EnvStep
from ludus.experience.rollout_replay import RolloutReplay, RolloutReplayConfig

B, T, GAMMA, A = 3, 4, 0.9, 2
CPU = torch.device("cpu")
SPECS = {"x": Spec((1,), "float32"), "frame": Spec((2, 3, 3), "uint8")}
GROUPS = [slice(0, 2), slice(2, 3)]


def make_cache(**changes: Any) -> RolloutReplay:
    settings = {"rollout": T, "replay": 3 * T * B, "replay_ratio": 2.0, "warmup": 0} | changes
    return RolloutReplay(RolloutReplayConfig(**settings), B, GAMMA, SPECS, CPU)


def env_step(t: int, ended: bool = False, first: bool = False) -> EnvStep:
    """Return a step with values 10t + row."""
    code = 10 * t + torch.arange(B)
    observation = {
        "x": code.float().unsqueeze(-1),
        "frame": (code % 251).to(torch.uint8).reshape(B, 1, 1, 1).repeat(1, 2, 3, 3),
    }
    flags = [torch.full((B,), x) for x in (ended, False, first)]
    return EnvStep(observation, code.float(), *flags, ~flags[-1])


def agent_step(t: int) -> AgentStep:
    code = 10 * t + torch.arange(B)
    state = HiddenState({"net/h": (code + 10).float().unsqueeze(-1)})
    return AgentStep({"action": code}, {"log_policy": -code.float().unsqueeze(-1).repeat(1, A)}, state)


class Writer:
    """Writes steps like the training loop, with episodes of 6 steps."""

    def __init__(self, cache: RolloutReplay, groups: list[slice] | None = None) -> None:
        self.cache, self.groups, self.t = cache, groups or [slice(0, B)], 0
        state = HiddenState({"net/h": torch.arange(B).float().unsqueeze(-1)})
        for rows in self.groups:
            cache.env_write(self.said(0).rows(rows), state.rows(rows), rows.start)

    @staticmethod
    def said(t: int) -> EnvStep:
        return env_step(t, ended=t % 7 == 6, first=t % 7 == 0)

    def fill(self) -> None:
        """Write a rollout, group by group."""
        for rows in self.groups:
            t = self.t
            while True:
                said = agent_step(t)
                part = AgentStep(
                    {k: x[rows] for k, x in said.action.items()},
                    {k: x[rows] for k, x in said.experience.items()},
                    said.state.rows(rows),
                )
                self.cache.agent_write(part, rows.start)
                t += 1
                self.cache.env_write(self.said(t).rows(rows), part.state, rows.start)
                if not self.cache.accepts(rows.start):
                    break
        self.t = t

    def reads(self) -> list[Batch]:
        """Read all batches that are ready."""
        found = []
        while self.cache.ready():
            found.append(self.cache.read())
        return found


def assert_column(batch: Batch, column: int, start: int, row: int) -> None:
    """Check that a column is what was written to ``row`` from time ``start`` on."""
    code = torch.tensor([10 * t + row for t in range(start, start + T + 1)])
    torch.testing.assert_close(batch.observation["x"][:, column, 0], code.float())
    assert batch.observation["frame"].dtype == torch.uint8
    assert torch.equal(batch.observation["frame"][:, column, 1, 2, 0], (code % 251).to(torch.uint8))
    torch.testing.assert_close(batch.reward[:, column], code[1:].float())
    assert torch.equal(batch.action["action"][:, column], code[:-1])
    torch.testing.assert_close(batch.experience["log_policy"][:, column, 1], -code[:-1].float())
    assert float(batch.state["net/h"][column, 0]) == code[0]
    times = range(start, start + T + 1)
    assert batch.first[:, column].tolist() == [t % 7 == 0 for t in times]
    assert batch.terminated[:, column].tolist() == [t % 7 == 6 for t in times[1:]]
    assert not batch.truncated.any()
    assert batch.real[:, column].tolist() == [t % 7 != 0 for t in times[1:]]
    torch.testing.assert_close(batch.discount[:, column], torch.tensor([GAMMA * (t % 7 != 6) for t in times[1:]]))


@pytest.mark.parametrize("groups", [None, GROUPS], ids=["together", "groups"])
def test_replayed_columns_equal_those_written(groups: list[slice] | None) -> None:
    """Three rollouts fit, so after six every replayed column is from the last three."""
    cache = make_cache(replay_ratio=20.0)
    writer = Writer(cache, groups)
    for rollout in range(6):
        writer.fill()
        fresh, *kept = writer.reads()
        assert fresh.index is None
        for row in range(B):
            assert_column(fresh, row, rollout * T, row)
        seen = set()
        for batch in kept:
            assert batch.index is not None
            assert batch.reward.shape == fresh.reward.shape
            assert batch.observation["frame"].stride() == fresh.observation["frame"].stride()
            for column, number in enumerate(batch.index.tolist()):
                written, row = divmod(number, B)
                assert_column(batch, column, written * T, row)
                seen.add(written)
        assert seen == set(range(max(0, rollout - 2), rollout + 1))


def test_stored_columns_are_drawn_uniformly() -> None:
    cache = make_cache(replay_ratio=600.0)
    writer = Writer(cache)
    for _ in range(3):
        writer.fill()
        kept = writer.reads()[1:]
    counts = torch.zeros(3 * B)
    for batch in kept:
        assert batch.index is not None
        counts += torch.bincount(batch.index, minlength=3 * B)
    n, p = counts.sum(), 1 / (3 * B)
    assert ((counts - n * p).abs() < 4.5 * (n * p * (1 - p)).sqrt()).all()


@pytest.mark.parametrize("ratio", [0.5, 4.0])
def test_number_of_replayed_batches_is_poisson(ratio: float) -> None:
    """Mean and variance of a Poisson variable are both the ratio; the mean's error is √(ratio/n), within 4.5 of it."""
    cache = make_cache(replay_ratio=ratio, rollout=1)
    writer = Writer(cache)
    counts = []
    for _ in range(1_000):
        writer.fill()
        counts.append(len(writer.reads()) - 1)
    drawn = torch.tensor(counts, dtype=torch.float64)
    n = len(counts)
    assert abs(float(drawn.mean()) - ratio) < 4.5 * (ratio / n) ** 0.5
    assert abs(float(drawn.var()) - ratio) < 4.5 * ((ratio + 2 * ratio**2) / n) ** 0.5
    assert cache.metrics()["replay/ratio"] == pytest.approx(float(drawn.mean()))


def test_nothing_is_replayed_during_warm_up() -> None:
    """Real steps count: of times 1 to 12, times 7 is a reset, so that three rollouts have 11 steps of 3 rows."""
    cache = make_cache(warmup=33, replay_ratio=50.0)
    writer = Writer(cache)
    reads = []
    for _ in range(3):
        writer.fill()
        reads.append(len(writer.reads()))
    assert reads[:2] == [1, 1]
    assert reads[2] > 1
    assert cache.metrics()["replay/size"] == 3 * T * B


def test_replay_ratio_zero_stores_nothing() -> None:
    cache = make_cache(replay_ratio=0.0)
    writer = Writer(cache)
    for _ in range(3):
        writer.fill()
        assert len(writer.reads()) == 1
    assert cache.metrics()["replay/size"] == 0
    assert cache.state_dict()["ring"] == {}


def copy(value: Any) -> Any:
    """Copy a state dict, as a checkpoint does."""
    if isinstance(value, torch.Tensor):
        return value.contiguous().clone()
    return {k: copy(x) for k, x in value.items()} if isinstance(value, dict) else value


def assert_same(one: Batch, two: Batch) -> None:
    for name in ("observation", "action", "experience", "state"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=0, atol=0)
    for name in ("first", "reward", "terminated", "truncated", "discount", "real", "index"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=0, atol=0)


@pytest.mark.parametrize("groups", [None, GROUPS], ids=["together", "groups"])
@pytest.mark.parametrize("rollouts", [0, 1, 2, 5])
def test_resume_is_exact(rollouts: int, groups: list[slice] | None) -> None:
    cache = make_cache()
    cache.generator.manual_seed(5)
    writer = Writer(cache, groups)
    for _ in range(rollouts):
        writer.fill()
        writer.reads()
    saved = copy(cache.state_dict())
    other = make_cache()
    other.load_state_dict(saved)
    again = Writer.__new__(Writer)
    again.cache, again.groups, again.t = other, writer.groups, writer.t
    for _ in range(4):
        writer.fill()
        again.fill()
        found, same = writer.reads(), again.reads()
        assert len(found) == len(same)
        for one, two in zip(found, same, strict=True):
            assert_same(one, two)
    assert other.metrics() == cache.metrics()


def test_resume_between_replayed_batches_reads_the_rest() -> None:
    cache = make_cache(replay_ratio=30.0)
    writer = Writer(cache)
    writer.fill()
    cache.read()
    cache.read()
    other = make_cache(replay_ratio=30.0)
    other.load_state_dict(copy(cache.state_dict()))
    while cache.ready():
        assert other.ready()
        assert_same(cache.read(), other.read())
    assert not other.ready()


def test_resume_without_saved_replay_warms_up_again() -> None:
    cache = make_cache(save_replay=False, warmup=2 * T * B - B)
    writer = Writer(cache)
    for _ in range(3):
        writer.fill()
        writer.reads()
    state = copy(cache.state_dict())
    assert not state["ring"]
    other = make_cache(save_replay=False, warmup=2 * T * B - B)
    other.load_state_dict(state)
    writer.cache = other
    writer.fill()
    (fresh,) = writer.reads()
    assert_column(fresh, 1, 3 * T, 1)
    assert other.metrics()["replay/size"] == T * B


def test_amend_changes_the_unfinished_rollout_only() -> None:
    """Stored rollouts end with the true observation; the next one starts with the new episode."""
    cache = make_cache(replay_ratio=30.0)
    writer = Writer(cache)
    writer.fill()
    writer.reads()
    new = env_step(90, first=True)
    cache.amend(new)
    writer.fill()
    fresh, *kept = writer.reads()
    assert fresh.first[0].all()
    torch.testing.assert_close(fresh.observation["x"][0], new.observation["x"])
    for batch in kept:
        assert batch.index is not None
        for column, number in enumerate(batch.index.tolist()):
            if number < B:
                assert_column(batch, column, 0, number)


def test_replayed_rollouts_do_not_continue_across_lost_episodes() -> None:
    """A ``first`` without an ending before it, in a rollout that is replayed."""
    cache = make_cache(replay_ratio=30.0)
    writer = Writer(cache)
    writer.said = lambda t: env_step(t, first=t == 3)  # type: ignore[method-assign]
    writer.fill()
    for batch in writer.reads():
        assert batch.real[:, 0].tolist() == [True, True, False, True]
        assert batch.continues[:, 0].tolist() == [1, 0, 0, 1]


def test_computed_bytes_equal_allocated_bytes() -> None:
    """The bytes of the ring without actions, experience and hidden states."""
    cache = make_cache()
    writer = Writer(cache)
    writer.fill()
    cache.read()
    held = sum(x.nbytes for name, x in cache.state_dict()["ring"].items() if not name.startswith(("action", "exp")))
    assert held * 3 == cache.bytes
    with pytest.raises(UserError, match=r"agent\.replay needs .* GB of memory, of which .* lower agent\.replay"):
        make_cache(replay=10**12)
    assert make_cache(replay=10**12, replay_ratio=0.0).bytes == 0
