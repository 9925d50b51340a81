"""native.c equals the Python implementation bit for bit, and is compiled if there is a compiler."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_model import PLAIN, STACKED, World
from test_experience_replay import play

from ludus.core.batch import Batch
from ludus.experience import native, sum_tree
from ludus.experience.reader import Gather
from ludus.experience.sum_tree import SumTree

compiled = pytest.mark.skipif(native.LIBRARY is None, reason="native.c was not compiled: there is no C compiler")


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_native_code_is_compiled_if_there_is_a_compiler() -> None:
    assert native.LIBRARY is not None, "install Ludus again: pip install --editable ."


def parts(batch: Batch) -> list[torch.Tensor]:
    whole = [batch.first, batch.reward, batch.terminated, batch.truncated, batch.discount, batch.weight, batch.index]
    named = (batch.observation, batch.action, batch.experience, batch.state)
    return [*whole, *(x for part in named for x in part.values())]  # type: ignore[list-item]


@compiled
@pytest.mark.parametrize(
    "kind", [{}, {"n_step": 3}, {"sequence": 6, "burn_in": 2, "overlap": 3}], ids=["plain", "n-step", "sequences"]
)
@pytest.mark.parametrize("groups", [[1], pytest.param([3], marks=pytest.mark.slow), [2, 1]], ids=str)
@pytest.mark.parametrize(
    ("specs", "irregular"), [(PLAIN, 0.0), (STACKED, 0.0), (STACKED, 0.5)], ids=["plain", "stacked", "irregular"]
)
@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "prioritized"])
@pytest.mark.filterwarnings("ignore:Observation .frames.")
def test_replay_reads_are_equal_with_and_without_native_code(
    kind: dict[str, Any],
    groups: list[int],
    specs: Any,
    irregular: float,
    prioritized: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, generator = World(groups, 7, longest=12, specs=specs, irregular=irregular), torch.Generator().manual_seed(0)
    config = {"replay": 60 * sum(groups), "prioritized": prioritized, "batch_size": 8, **kind}
    one = world.replay(**config)
    monkeypatch.setattr(native, "LIBRARY", None)
    monkeypatch.setattr(sum_tree, "PLAIN", sum_tree.COMPILED)  # sums of other blocks round otherwise
    other = world.replay(**config)
    late: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(28):
        play(world, 5, one, other)
        if not one.size:
            continue
        left, right = one.read(), other.read()
        for a, b in zip(parts(left), parts(right), strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())  # NaN is equal to NaN
        assert left.index is not None
        late.append((left.index.clone(), torch.rand(8, generator=generator)))
        if len(late) > 12:  # by now a part of it may have expired
            for index, surprise in late[::3]:
                one.feedback(index, surprise)
                other.feedback(index, surprise)
            late.clear()
        assert one.metrics() == other.metrics()


@compiled
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 5e-324, 1e-300, 1e-12, 0.1, 1 / 3, 1.0, 7.7, 1e9]), min_size=1, max_size=3_000),
    st.lists(st.floats(0, 1), min_size=1, max_size=50),
)
def test_sum_tree_draws_are_equal_with_and_without_native_code(values: list[float], uniform: list[float]) -> None:
    trees = []
    for library in (native.LIBRARY, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "LIBRARY", library)
            patch.setattr(sum_tree, "PLAIN", sum_tree.COMPILED)
            trees.append(SumTree(len(values)))
        trees[-1].set(torch.arange(len(values)), torch.tensor(values, dtype=torch.float64))
    one, other = trees
    assert one.total == other.total
    for a, b in zip(one._flat, other._flat, strict=True):
        np.testing.assert_array_equal(a, b)
    if one.total:
        for x, y in zip(*(tree.sample(torch.tensor(uniform, dtype=torch.float64)) for tree in trees), strict=True):
            assert torch.equal(x, y)


@compiled
@pytest.mark.parametrize("slot", [-1, 20, 2**60])
def test_invalid_slot_raises(slot: int) -> None:
    with pytest.raises(IndexError, match="outside"):
        Gather([(torch.zeros(20, 3), torch.zeros(2, 3))])(torch.tensor([3, slot]))


@pytest.mark.parametrize("index", [1_000, 2**60])
@pytest.mark.usefixtures("each_way")
def test_invalid_tree_index_raises(index: int) -> None:
    tree = SumTree(1_000)
    with pytest.raises(IndexError):
        tree.set(torch.tensor([3, index]), torch.ones(2, dtype=torch.float64))
    assert tree.total == 0


def test_damaged_or_outdated_library_is_not_used(tmp_path: Path) -> None:
    assert native.load(tmp_path / "none.so") is None
    (tmp_path / "damaged.so").write_bytes(b"\x7fELF and no more")
    assert native.load(tmp_path / "damaged.so") is None
    (tmp_path / "native.c").write_bytes(native.SOURCE.read_bytes() + b"\n")
    assert native.load(source=tmp_path / "native.c") is None
