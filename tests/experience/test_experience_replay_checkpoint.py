"""Replays in checkpoints, in files and as sequences, and invalid settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replay_model import CPU, PLAIN, STACK, STACKED, Moment, World
from test_experience_replay import check, play

from ludus.core.batch import Batch
from ludus.core.encoding import decode, encode
from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.core.types import State
from ludus.experience.config import ReplayConfig
from ludus.experience.memory import check_memory, replay_bytes
from ludus.experience.replay import ExperienceReplay

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n-step": {"n_step": 3},
    "prioritized": {"prioritized": True, "n_step": 2},
    "sequences": {"sequence": 6, "burn_in": 2, "overlap": 3, "batch_size": 8},
    "prioritized sequences": {"sequence": 4, "batch_size": 8, "prioritized": True},
}


def through_a_checkpoint(state: State) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    node = encode(state, tensors)
    return decode(node, {name: x.clone() for name, x in tensors.items()})


def same(a: Batch, b: Batch) -> None:
    for name, x in vars(a).items():
        y = getattr(b, name)
        pairs = [(x[k], y[k]) for k in x] if isinstance(x, dict) else [(x, y)]
        for left, right in pairs:
            if left is None or right is None:
                assert left is right, name
                continue
            np.testing.assert_array_equal(left.numpy(), right.numpy(), err_msg=name)  # NaN equals NaN here


def surprise(batch: Batch) -> torch.Tensor:
    assert batch.index is not None
    return (batch.index % 7).double()


@pytest.mark.parametrize("steps", [30, 90])  # before and after the ring is full
@pytest.mark.parametrize("groups", [[3], [2, 1]])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stacked", ["plain", "stacked", "irregular"])
@pytest.mark.filterwarnings("ignore:Observation .frames.")
def test_resumed_replay_reads_equal_batches(kind: str, groups: list[int], steps: int, stacked: str) -> None:
    world = World(groups, 8, specs=PLAIN if stacked == "plain" else STACKED, irregular=0.5 * (stacked == "irregular"))
    whole, resumed = (world.replay(replay=41 * 3, **KINDS[kind]) for _ in range(2))
    play(world, steps, whole)
    batch = whole.read()
    whole.feedback(batch.index, surprise(batch))  # type: ignore[arg-type]
    resumed.load_state_dict(through_a_checkpoint(whole.state_dict()))
    resumed.amend(world.last(slice(0, 3)))
    assert whole.ready() == resumed.ready()
    for _ in range(5):
        for _ in range(3):
            batch = whole.read()
            again = resumed.read()
            same(batch, again)
            for replay in (whole, resumed):
                replay.feedback(batch.index, surprise(batch))  # type: ignore[arg-type]
        play(world, 15, whole, resumed)
        assert whole.metrics() == resumed.metrics()


def test_only_the_filled_part_is_saved() -> None:
    world = World([2], 0)
    replay = world.replay(replay=2 * 1000)
    play(world, 10, replay)
    tensors: dict[str, torch.Tensor] = {}
    encode(replay.state_dict(), tensors)
    assert sum(x.numel() * x.element_size() for x in tensors.values()) < 10_000  # mostly the generator's 5,056
    play(world, 1200, replay)
    state = replay.state_dict()["groups"][0]["steps"]["observation/x"]
    assert sum(part.shape[1] for part in state) == 1000
    assert state[-1].data_ptr() == replay._ring.columns["observation/x"].data_ptr()  # a view, no copy


@pytest.mark.parametrize("length", [30, 200])
def test_replay_of_another_length_loads_what_fits(length: int) -> None:
    world = World([2], 3, specs=STACKED)
    old, new = world.replay(replay=2 * 60, n_step=2, batch_size=32), world.replay(replay=2 * length, n_step=2)
    play(world, 100, old)
    new.load_state_dict(through_a_checkpoint(old.state_dict()))
    held = world.drawable(min(length, 60), 2)
    assert new.size <= len(held)
    for _ in range(5):
        check(world, new.read(), 2, held)
        play(world, 5, new)
        held |= world.drawable(length, 2)


@pytest.mark.parametrize("irregular", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Observation .frames.")
def test_resume_without_saved_replay_warms_up_again(kind: str, irregular: float) -> None:
    settings = {"replay": 3 * 60, "save_replay": False, "warmup": 50} | KINDS[kind]
    world = World([2, 1], 8, specs=STACKED, irregular=irregular)
    old, new = (world.replay(**settings) for _ in range(2))
    play(world, 80, old)
    new.load_state_dict(through_a_checkpoint(old.state_dict()))
    new.amend(world.last(slice(0, 3)))
    begun = [len(row.steps) - 1 for row in world.rows]
    assert new.size == 0
    assert not new.ready()
    play(world, 10, new)
    assert not new.ready()
    play(world, 60, new)
    assert new.ready()
    numbers = new.read().index
    assert numbers is not None
    assert all(number // 3 >= begun[number % 3] for number in numbers.tolist())
    if "sequence" not in settings:
        check_batch = new.read()
        check_batch.weight = torch.ones_like(check_batch.weight)
        check(world, check_batch, int(settings.get("n_step", 1)), world.drawable(60, int(settings.get("n_step", 1))))


@pytest.mark.parametrize("specs", [PLAIN, STACKED])
@pytest.mark.parametrize("n", [1, 3])
def test_no_transition_leads_to_an_episode_started_by_a_resume(specs: Any, n: int) -> None:
    world = World([3], 21, longest=50, specs=specs)
    old, new = (world.replay(replay=3 * 100, n_step=n, prioritized=True, importance_exponent=0) for _ in range(2))
    play(world, 60, old)
    assert not any(row.steps[-1].first for row in world.rows)
    new.load_state_dict(through_a_checkpoint(old.state_dict()))
    for row in world.rows[:2]:
        t = len(row.steps) - 1
        frames = [[-7 - i, t] for i in range(STACK)]
        row.steps[-1] = Moment([-5.0, t], frames, np.nan, False, False, True, 1000.0 * row.name + t)
        row.left, row.new = 3, False
    new.amend(world.last(slice(0, 3)))
    for _ in range(4):
        held = world.drawable(100, n)
        assert new.size == len(held)
        for _ in range(5):
            check(world, new.read(), n, held)
        play(world, 2, new)


def test_replay_in_files_equals_replay_in_memory(tmp_path: Path) -> None:
    world = World([2, 1], 4, specs=STACKED)
    folder = tmp_path / "new" / "folder"
    memory, files = world.replay(replay=150), world.replay(replay=150, replay_folder=str(folder))
    play(world, 80, memory, files)
    for _ in range(3):
        same(memory.read(), files.read())
    assert folder.is_dir()
    assert not list(folder.iterdir())  # nothing to be left behind, however the process ends
    again = world.replay(replay=150)
    again.load_state_dict(through_a_checkpoint(files.state_dict()))
    same(memory.read(), again.read())


@pytest.mark.parametrize("kind", ["sequences", "prioritized sequences"])
@pytest.mark.parametrize("groups", [[1], [3], [2, 1]])
def test_sequences_are_drawn_as_written(kind: str, groups: list[int]) -> None:
    settings = KINDS[kind]
    length, burn_in, overlap = settings["sequence"], settings.get("burn_in", 0), settings.get("overlap", 0)
    steps, stride = burn_in + length, length - overlap
    world = World(groups, 6, longest=7)
    replay = world.replay(replay=50 * len(world.rows), importance_exponent=0, **settings)
    drawn = set()
    for _ in range(12):
        play(world, 23, replay)
        starts = set()
        for row in world.rows:
            now = len(row.steps) - 1
            starts |= {(t, row.name) for t in range(max(0, now - 49), now - steps + 1) if t % stride == 0}
        assert replay.size == len(starts)
        for _ in range(3):
            batch = replay.read()
            assert batch.index is not None
            for i, number in enumerate(batch.index.tolist()):
                t, row = divmod(number, len(world.rows))
                assert (t, row) in starts
                drawn.add((t, row))
                moments = world.rows[row].steps[t : t + steps + 1]
                assert batch.observation["x"][:, i].tolist() == [m.x for m in moments]
                assert batch.first[:, i].tolist() == [m.first for m in moments]
                assert batch.real[:, i].tolist() == [not m.first for m in moments[1:]]
                for name in ("reward", "terminated", "truncated"):
                    values = [getattr(m, name) for m in moments[1:]]
                    np.testing.assert_array_equal(getattr(batch, name)[:, i].numpy(), values)
                assert batch.discount[:, i].tolist() == [0.5 * (not m.terminated) for m in moments[1:]]
                np.testing.assert_array_equal(
                    batch.action["a"][:, i].numpy(), np.float32([m.action for m in moments[:-1]])
                )
                assert batch.state["h"][i].tolist() == [row, t]
    assert len(drawn) > 20


def test_all_steps_of_a_sequence_have_its_weight() -> None:
    world = World([2], 6)
    replay = world.replay(replay=200, sequence=5, batch_size=16, prioritized=True)
    play(world, 90, replay)
    for _ in range(3):
        batch = replay.read()
        assert batch.index is not None
        weight = batch.weight[0]
        assert torch.equal(batch.weight, weight.expand_as(batch.reward))
        assert weight.max() == 1
        replay.feedback(batch.index, torch.rand(16, generator=torch.Generator().manual_seed(1)) + 0.1)
    assert batch.weight.unique().numel() > 3


@pytest.mark.parametrize(
    ("settings", "batch", "says"),
    [
        (
            {"replay": 20, "n_step": 5, "batch_size": 1},
            4,
            r"agent.replay is 20: 5 steps.*agent.n_step 5; raise it to 28",
        ),
        (
            {"replay": 90, "sequence": 10, "burn_in": 5, "batch_size": 1},
            4,
            r"22 steps.*sequences of 15.*raise it to 100",
        ),
        ({"replay": 100, "batch_size": 100}, 1, r"never 100 \(agent.batch_size\)"),
        ({"replay": 100, "sequence": 10, "batch_size": 10}, 1, r"never 10 \(agent.batch_size\)"),
        ({"replay": 10**13}, 1, r"agent.replay needs [\d,]+\.\d\d GB in memory, where .* agent.replay_folder"),
        ({"replay": 10**13, "replay_folder": "/tmp/none/such"}, 1, r'GB in the folder "/tmp/none/such"'),
        ({"replay": 1000, "replay_folder": "/dev/null/x"}, 1, r'agent.replay_folder "/dev/null/x" cannot hold'),
    ],
)
def test_invalid_replay_settings_raise(settings: dict[str, Any], batch: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        ExperienceReplay(ReplayConfig(**settings), batch, 0.9, PLAIN, CPU)


def test_bytes_of_a_replay() -> None:
    config = ReplayConfig(replay=1000)
    small = replay_bytes(config, 2, PLAIN, {"a": Spec((3,), "float64")})
    assert small == 1000 * (8 + 24 + 17)
    frames = {"frames": Spec((4, 84, 84), "uint8", stack=4)}
    whole = {"frames": Spec((4, 84, 84), "uint8")}
    large = ReplayConfig(replay=1_000_000)
    assert replay_bytes(large, 1, frames) < 0.29 * replay_bytes(large, 1, whole)
    check_memory(10, 10, "")
    with pytest.raises(UserError, match=r"needs 7.00 GB in memory, where 3.50 GB are free; lower agent.replay"):
        check_memory(7_000_000_000, 3_500_000_000, "")


def test_computed_bytes_equal_allocated_bytes() -> None:
    world = World([2], 0, specs=STACKED)
    settings = {"replay": 2 * 500, "prioritized": True}
    replay = world.replay(**settings)
    play(world, 3, replay)
    columns = {k: x for k, x in replay._ring.columns.items() if not k.startswith("experience/")}
    frames = replay._frames["frames"]
    taken = [*columns.values(), frames._stream.columns["frame"], frames._newest_ring.columns["newest"]]
    taken += [torch.from_numpy(x) for x in (replay._drawable, replay._groups[0]._queue)]
    bytes_taken = sum(x.numel() * x.element_size() for x in taken) + 16 * 1000  # and the tree
    needed = replay_bytes(ReplayConfig(**settings), 2, STACKED, {"a": Spec((), "float32")})
    assert needed == pytest.approx(bytes_taken, rel=0.01)
