"""Transitions drawn from a replay equal those written, and are drawn with the right probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_model import CPU, GAMMA, PLAIN, STACKED, World

from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.spec import Specs
from ludus.experience.reader import Gather, n_step
from ludus.experience.replay import ExperienceReplay

GROUPS = st.sampled_from([[1], [3], [2, 1]])
pytestmark = pytest.mark.usefixtures("each_way")


def play(world: World, steps: int, *replays: ExperienceReplay) -> None:
    """Write some steps, with the groups in random order."""
    for _ in range(steps):
        for group in world.rng.permutation(len(world.groups)):
            for _ in range(int(world.rng.integers(1, 3)) if len(world.groups) > 1 else 1):
                world.write(int(group), *replays)


def poison(replay: ExperienceReplay) -> None:
    """Write NaN to all unused slots."""
    for name, x in replay._ring.columns.items():
        for group in replay._groups.values():
            if name != "flags" and group.time + 1 < replay.length:
                x[group.rows, group.time + 1 :] = torch.nan


def check(world: World, batch: Batch, n: int, drawable: set[tuple[int, int]]) -> None:
    assert batch.index is not None
    assert batch.reward.shape == batch.discount.shape == batch.weight.shape == (1, len(batch.index))
    for i, number in enumerate(batch.index.tolist()):
        t, row = divmod(number, len(world.rows))
        assert (t, row) in drawable
        expected = world.transition(t, row, n)
        for name, x in batch.observation.items():
            assert x[:, i].tolist() == expected[name]
        assert batch.first[:, i].tolist() == expected["first"]
        assert batch.action["a"][0, i] == expected["action"]
        assert batch.experience["e"][0, i].tolist() == [expected["action"] + 0.25]
        for name in ("reward", "discount", "terminated", "truncated"):
            assert getattr(batch, name)[0, i] == expected[name], name
    assert (batch.weight == 1).all()


@settings(max_examples=30, deadline=None)
@given(
    groups=GROUPS, n=st.integers(1, 5), seed=st.integers(0, 10_000), longest=st.integers(1, 9),
    length=st.integers(9, 40), specs=st.sampled_from([PLAIN, STACKED]), prioritized=st.booleans(),
)  # fmt: skip
def test_transitions_are_drawn_as_written(
    groups: list[int], n: int, seed: int, longest: int, length: int, specs: Specs, prioritized: bool
) -> None:
    """The ring wraps several times; episodes are as short as one step, and shorter than the stack."""
    world = World(groups, seed, longest, specs)
    settings = {"replay": length * len(world.rows), "n_step": n, "prioritized": prioritized}
    replay = world.replay(batch_size=4, importance_exponent=0.0, **settings)
    play(world, 3, replay)
    poison(replay)
    for _ in range(8):
        play(world, int(world.rng.integers(1, 25)), replay)
        drawable = world.drawable(length, n)
        assert replay.size == len(drawable)
        for _ in range(4 if drawable else 0):
            batch = replay.read()
            check(world, batch, n, drawable)
            replay.feedback(batch.index, torch.from_numpy(world.rng.random(4)))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Observation .frames.")
@settings(max_examples=12, deadline=None)
@given(
    groups=GROUPS, n=st.integers(1, 4), seed=st.integers(0, 10**6), longest=st.sampled_from([3, 12, 10**6]),
    length=st.integers(9, 40), irregular=st.sampled_from([0.3, 1.0]), prioritized=st.booleans(),
)  # fmt: skip
def test_irregular_stacks_are_drawn_as_written(
    groups: list[int], n: int, seed: int, longest: int, length: int, irregular: float, prioritized: bool
) -> None:
    """Whole stacks are stored from the first irregular one on, also after the ring has wrapped."""
    world = World(groups, seed, longest, STACKED)
    sizes = {"replay": length * len(world.rows), "n_step": n, "prioritized": prioritized}
    replay = world.replay(batch_size=4, importance_exponent=0.0, **sizes)
    play(world, int(world.rng.integers(1, 90)), replay)
    held = world.drawable(length, n)
    assert not replay._frames["frames"].whole
    for row in world.rows:
        row.irregular = irregular
    for _ in range(8):
        play(world, int(world.rng.integers(1, 25)), replay)
        drawable = world.drawable(length, n)
        assert replay.size <= len(drawable)
        for _ in range(4 if replay.size else 0):
            check(world, replay.read(), n, drawable)
    play(world, 3 * length, replay)
    if replay._frames["frames"].whole:  # episodes of a step or two may never have had a second stack
        assert replay.size == len(world.drawable(length, n))
    assert replay._frames["frames"].whole or longest == 3 or not held


@pytest.mark.parametrize("specs", [PLAIN, STACKED], ids=["plain", "stacked"])
@pytest.mark.parametrize("groups", [[1], [2, 1]], ids=str)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_window_contains_the_states_inside_n_step_transitions(n: int, groups: list[int], specs: Specs) -> None:
    world = World(groups, 5, longest=7, specs=specs)
    world.window = True
    replay = world.replay(replay=40 * len(world.rows), n_step=n)
    reached = set()
    for _ in range(12):
        play(world, 10, replay)
        drawable = world.drawable(40, n)
        if not drawable:
            continue
        batch = replay.read()
        check(world, batch, n, drawable)  # the window leaves the rest as it is
        assert batch.index is not None
        for i, number in enumerate(batch.index.tolist()):
            t, row = divmod(number, len(world.rows))
            steps, k = world.rows[row].steps, 1
            ended = steps[t + 1].terminated or steps[t + 1].truncated
            while k < n and not ended and not steps[t + k + 1].first:
                assert batch.window["discount"][k - 1, i] == GAMMA**k
                assert batch.window["observation/x"][k - 1, i].tolist() == steps[t + k].x
                assert batch.window["action/a"][k - 1, i] == steps[t + k].action
                if "frames" in specs:
                    assert batch.window["observation/frames"][k - 1, i].tolist() == steps[t + k].frames
                k += 1
                ended = steps[t + k].terminated or steps[t + k].truncated
            assert (batch.window["discount"][k - 1 :, i] == 0).all()
            reached.add(k)
    assert reached == set(range(1, n + 1))
    assert not World(groups, 5).replay(replay=200, n_step=n)._reader._window


def test_irregular_stacks_are_reported_once_with_their_memory() -> None:
    world, told = World([2], 0, longest=50, specs=STACKED), []
    replay = world.replay(replay=2 * 800)
    replay.on_warning = told.append
    play(world, 100, replay)
    before = replay.bytes
    assert not told
    world.rows[1].irregular = 1.0
    play(world, 100, replay)
    assert len(told) == 1
    assert told[0].startswith('Observation "frames": a stack of 4 frames was not the one before it shifted by one')
    frames = replay._frames["frames"]._stream.columns["frame"]
    assert frames.shape == (2, (800 + 2) * 4, 1, 2)
    assert replay.bytes - before == frames.nbytes - 2 * (800 + 100 + 2 * 4) * 8
    assert f"{replay.bytes / 1e6:,.1f} MB" in told[0]


def test_irregular_stacks_that_do_not_fit_in_memory_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([1], 0, longest=50, specs=STACKED)
    replay = world.replay(replay=800)
    play(world, 3, replay)
    monkeypatch.setattr("ludus.experience.replay.free_bytes", lambda *_: replay.bytes + 1)
    world.rows[0].irregular = 1.0
    with pytest.raises(UserError, match=r'Observation "frames": .* stores whole stacks, for which agent.replay needs'):
        play(world, 100, replay)


@pytest.mark.parametrize("groups", [[1], [3], [2, 1]])
@pytest.mark.parametrize("prioritized", [False, True])
def test_items_are_drawn_uniformly(groups: list[int], prioritized: bool) -> None:
    """Chi-square test; all priorities are equal at first."""
    world = World(groups, 0)
    length = 60 // len(world.rows) * 2
    replay = world.replay(replay=length * len(world.rows), prioritized=prioritized)
    play(world, 100, replay)
    drawable = sorted(world.drawable(length, 1))
    rounds = 400
    numbers = np.concatenate([replay.read().index.numpy() for _ in range(rounds)])  # type: ignore[union-attr]
    counts = [int((numbers == t * len(world.rows) + row).sum()) for t, row in drawable]
    assert sum(counts) == rounds * 32
    expected, freedom = rounds * 32 / len(drawable), len(drawable) - 1
    square = sum((count - expected) ** 2 / expected for count in counts)
    assert square < freedom + 4 * np.sqrt(2 * freedom)
    if not prioritized:  # one from each part of the sum would come out more even than chance
        assert square > freedom - 4 * np.sqrt(2 * freedom)


def test_probabilities_and_importance_weights_follow_priorities() -> None:
    world = World([2], 3)
    replay = world.replay(replay=80, prioritized=True, priority_exponent=0.5)
    play(world, 60, replay)
    items = torch.tensor([t * 2 + row for t, row in sorted(world.drawable(40, 1))])
    surprise = torch.linspace(0.1, 9, len(items))
    replay.feedback(items, surprise)
    replay.schedule(0.5)
    p = (surprise.double().numpy() + 1e-6) ** 0.5
    p /= p.sum()
    counts = np.zeros(len(items))
    for _ in range(600):
        batch = replay.read()
        assert batch.index is not None
        which = np.searchsorted(items.numpy(), batch.index.numpy())
        counts += np.bincount(which, minlength=len(items))
        weight = (len(items) * p[which]) ** -0.7  # from 0.4 half the way to 1
        np.testing.assert_allclose(batch.weight[0].numpy(), weight / weight.max(), rtol=1e-6)
    drawn = 600 * 32
    assert (abs(counts - drawn * p) < 5 * np.sqrt(drawn * p)).all()
    assert replay.metrics()["replay/importance_exponent"] == pytest.approx(0.7)


def test_new_items_get_the_largest_priority_and_overwritten_ones_zero() -> None:
    world = World([1], 5, longest=9)
    replay = world.replay(replay=50, prioritized=True, priority_exponent=1.0)
    play(world, 45, replay)
    old = replay.read().index
    assert old is not None
    replay.feedback(old, torch.full((32,), 7.0))
    play(world, 30, replay)
    numbers = replay._groups[0].numbers
    values = replay._priorities.get(torch.from_numpy(numbers)).numpy()  # type: ignore[union-attr]
    known = np.isin(numbers, old.numpy())
    assert known.any()
    assert (values[known] == np.float32(7 + 1e-6)).all()
    assert (values[numbers > 45] == np.float32(7 + 1e-6)).all()  # written since
    assert (values[~known & (numbers < 44)] == 1).all()  # never read
    play(world, 25, replay)
    gone = ~np.isin(old.numpy(), replay._groups[0].numbers)
    assert gone.any()
    replay.feedback(old[torch.from_numpy(gone)], torch.full((int(gone.sum()),), 1e9))  # of what is there no more
    assert replay.metrics()["replay/largest_priority"] == np.float32(7 + 1e-6)
    drawn = np.concatenate([replay.read().index.numpy() for _ in range(20)])  # type: ignore[union-attr]
    assert set(drawn.tolist()) <= set(replay._groups[0].numbers.tolist())


def drawn_from() -> tuple[ExperienceReplay, torch.Tensor]:
    """Return a prioritized replay, and the index of 32 items read from it."""
    world = World([1], 5)
    replay = world.replay(replay=50, prioritized=True, priority_exponent=1.0)
    play(world, 45, replay)
    index = replay.read().index
    assert index is not None
    return replay, index


def test_nan_priority_raises() -> None:
    replay, index = drawn_from()
    with pytest.raises(ValueError, match="finite"):
        replay.feedback(index, torch.full((32,), torch.nan))
    replay.read()  # nothing was written of them
    assert replay.metrics()["replay/largest_priority"] == 1.0


@pytest.mark.parametrize("shape", [(1,), (31,), (33,), (32, 1), (1, 32), ()])
def test_priorities_of_another_shape_raise(shape: tuple[int, ...]) -> None:
    replay, index = drawn_from()
    with pytest.raises(ValueError, match="32 items were read"):
        replay.feedback(index, torch.ones(shape))


def test_feedback_may_be_empty_and_its_index_of_any_integer_type() -> None:
    world = World([1], 5)
    replay = world.replay(replay=50, prioritized=True, priority_exponent=1.0)
    play(world, 45, replay)
    replay.feedback(torch.empty(0, dtype=torch.int64), torch.empty(0))  # before anything was read
    replay.feedback(torch.tensor([3, 4, 5], dtype=torch.int32), torch.tensor([2.0, 0.5, 4.0]))
    assert replay._priorities is not None
    values = replay._priorities.get(torch.tensor([2, 3, 4, 5, 6]))
    torch.testing.assert_close(values, torch.tensor([1.0, 2.0, 0.5, 4.0, 1.0], dtype=torch.float64), rtol=1e-5, atol=0)


def test_n_step_equals_its_definition() -> None:
    """Compare with a loop in float64, with NaN after every stop."""
    rng, n, m, gamma = np.random.default_rng(0), 5, 400, 0.97
    reward = rng.standard_normal((n, m)).astype(np.float32)
    terminated, truncated, real = (rng.random((n, m)) < 0.15 for _ in range(3))
    real = ~real
    real[0] = True
    expected: dict[str, list[Any]] = {"reward": [], "discount": [], "steps": [], "terminated": [], "truncated": []}
    for i in range(m):
        total, k = 0.0, 0
        for k in range(1, n + 1):
            total += gamma ** (k - 1) * float(reward[k - 1, i])
            if terminated[k - 1, i] or truncated[k - 1, i] or k == n or not real[k, i]:
                break
        last = bool(terminated[k - 1, i])
        found = (total, 0.0 if last else gamma**k, k, last, bool(truncated[k - 1, i]))
        for name, value in zip(expected, found, strict=True):
            expected[name].append(value)
        reward[k:, i] = np.nan
    powers = (gamma ** torch.arange(n + 1, dtype=torch.float64)).float()
    got = n_step(*(torch.from_numpy(x) for x in (reward, terminated, truncated, real)), powers)
    for name, values in expected.items():
        x = getattr(got, name).numpy()
        np.testing.assert_allclose(x, np.array(values, x.dtype), rtol=1e-5, atol=1e-6, err_msg=name)
    assert set(expected["steps"]) == {1, 2, 3, 4, 5}


def test_frames_are_stored_once() -> None:
    """A stack of 4 takes about one frame per step."""
    world = World([2], 0, longest=50, specs=STACKED)
    replay = world.replay(replay=2 * 800)
    play(world, 10, replay)
    frames = replay._frames["frames"]._stream.columns["frame"]
    assert frames.shape[0] == 2
    assert frames.shape[1] < 800 * 1.15
    assert frames.shape[2:] == (1, 2)


@pytest.mark.parametrize("per_step", [0.1, 0.25, 1.0, 3.0])
def test_credit_is_earned_by_real_steps_after_the_warm_up(per_step: float) -> None:
    world = World([2], 4, longest=5)
    replay = world.replay(replay=400, warmup=60, updates_per_step=per_step, batch_size=16)
    reads, steps = 0, 0
    for _ in range(300):
        world.write(0, replay)
        time = len(world.rows[0].steps) - 1
        steps = sum(not row.steps[t].first for row in world.rows for t in range(1, time + 1))
        while replay.ready():
            assert steps > 60
            replay.read()
            reads += 1
        assert reads == int((max(0, steps - 60)) * per_step + 1e-6)
    assert replay.metrics()["replay/updates_per_step"] == pytest.approx(per_step, abs=1 / (steps - 60))
    assert replay.metrics()["replay/size"] == replay.size


def test_steps_before_the_first_full_batch_earn_no_updates() -> None:
    world = World([1], 4, longest=10**6)
    replay = world.replay(replay=4000, warmup=60, batch_size=16, sequence=20, updates_per_step=1.0)
    reads = 0
    for time in range(401):
        world.write(0, replay)
        while replay.ready():
            replay.read()
            reads += 1
        reached = replay.metrics().get("replay/updates_per_step")
        assert reached == (reads / (time - 60) if time > 60 else None)
    assert 0 < reads < 100


@pytest.mark.parametrize(
    ("per_step", "groups", "pauses"),
    [
        (1.0, [1, 1], range(16, 500, 16)),  # two rows, so that 32 steps are 16 writes
        (0.1, [1, 1], range(16, 500, 16)),
        (0.01, [1, 1], range(16, 700, 16)),  # updates stay rarer than pauses
        (1.0, [2, 1], range(10, 334, 10)),
        (1.0, [40], range(1, 26)),
    ],
)
def test_container_regains_control_while_updates_are_rare(per_step: float, groups: list[int], pauses: range) -> None:
    world = World(groups, 4, longest=10**6)  # one episode, so that every step counts
    rows = sum(groups)
    replay = world.replay(replay=4000, warmup=1000, batch_size=16, updates_per_step=per_step)
    for time in range(700 if rows < 9 else 40):
        for group, at in enumerate(world.groups):
            world.write(group, replay)
            due = replay.ready()
            if time:
                assert replay.accepts(at.start) == (not due and time not in pauses), time
            while replay.ready() and group == len(groups) - 1:
                replay.read()


def test_rows_do_not_step_while_a_read_is_due() -> None:
    world = World([1, 1], 4)
    replay = world.replay(replay=4000, warmup=100, batch_size=16)
    while not replay.ready():
        world.write(0, replay)
        world.write(1, replay)
    assert not replay.accepts(0)
    assert not replay.accepts(1)
    while replay.ready():
        replay.read()
    assert replay.accepts(0)


def test_ready_if_the_ring_never_holds_a_full_batch() -> None:
    """With episodes of one step, half of all transitions are padding."""
    world = World([1], 0, longest=1)
    replay = world.replay(replay=40, batch_size=32)
    for _ in range(100):
        world.write(0, replay)
    assert 0 < replay.size < 32
    assert replay.ready()
    check(world, replay.read(), 1, world.drawable(40, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])  # numpy knows no bfloat16
def test_gather_copies_rows(dtype: torch.dtype) -> None:
    source = (torch.arange(60) % 7 > 3).to(dtype).view(20, 3)
    slots = torch.tensor([3, 19, 0, 3])
    four, three = (torch.empty(n, 3, dtype=dtype) for n in (4, 3))
    Gather([(source, four), (source, three)])(slots)
    assert torch.equal(four, source[slots])
    assert torch.equal(three, source[slots[:3]])  # an output with fewer rows takes the first


def test_discount_and_reuse_of_memory() -> None:
    world = World([3], 2)
    replay = world.replay(replay=150)
    play(world, 60, replay)
    one, pointer = replay.read(), replay.read().observation["x"].data_ptr()
    assert one.observation["x"].data_ptr() == pointer  # made once
    assert set(one.discount.unique().tolist()) <= {0.0, GAMMA}
    assert one.observation["x"].is_contiguous()
    assert one.observation["x"].device == CPU
