"""SumTree compared with plain sums: proportions, zeros, rounding, order of calls, reload."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.experience import sum_tree
from ludus.experience.sum_tree import SumTree

CAPACITIES = [1, 2, 7, 1_000, 100_003]
pytestmark = pytest.mark.usefixtures("each_way")
LAST = 1.0 - 2.0**-53  # the greatest float64 below 1


@pytest.fixture(params=["as it is", "four levels"])
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make trees of small capacities as deep as those of many millions."""
    if request.param == "four levels":
        monkeypatch.setattr(sum_tree, "COMPILED", (3, 2))
        monkeypatch.setattr(sum_tree, "PLAIN", (3, 2))


def make(values: np.ndarray) -> SumTree:
    tree = SumTree(len(values))
    tree.set(torch.arange(len(values)), torch.from_numpy(values))
    return tree


def numbers(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def inside(tree: SumTree) -> list[np.ndarray]:
    """Return all sums, from the leaves up."""
    return [*tree._flat, tree.total]


def naive(values: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(values), uniform * values.sum(), "right")


@pytest.mark.usefixtures("shape")
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_sample_equals_a_plain_running_sum(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    values = rng.integers(0, 9, capacity) / 8.0  # all sums are exact
    values[rng.integers(capacity)] = 1.0
    tree = make(values)
    assert tree.total == values.sum()
    uniform = np.concatenate([[0.0, LAST], rng.random(2_000)])
    np.testing.assert_array_equal(tree.sample(torch.from_numpy(uniform))[0].numpy(), naive(values, uniform))


@pytest.mark.parametrize("capacity", [1_000, 100_003])
def test_every_value_has_an_interval_of_its_size(capacity: int) -> None:
    values = np.random.default_rng(0).integers(0, 5, capacity).astype(np.float64)
    ends, held = np.cumsum(values), np.flatnonzero(values)
    tree = make(values)
    first = torch.from_numpy((ends - values + 0.25)[held] / ends[-1])
    last = torch.from_numpy((ends - 0.25)[held] / ends[-1])
    for uniform in (first, last):
        np.testing.assert_array_equal(tree.sample(uniform)[0].numpy(), held)


writes = st.lists(
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([0.0, 1e-12, 0.1, 1 / 3, 1.0, 7.7, 1e9])), max_size=30),
    max_size=6,
)


@pytest.mark.usefixtures("shape")
@pytest.mark.parametrize("capacity", CAPACITIES[:4])
def test_sums_depend_on_the_values_alone(capacity: int) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(writes, st.lists(st.floats(0, LAST), max_size=30))
    def check(batches: list[list[tuple[int, float]]], uniform: list[float]) -> None:
        tree, values = SumTree(capacity), np.zeros(capacity)
        for batch in batches:
            index = [i % capacity for i, _ in batch]
            for i, (_, value) in zip(index, batch, strict=True):  # one by one: the last of equal indices stays
                values[i] = value
            tree.set(torch.tensor(index, dtype=torch.int64), numbers(*[value for _, value in batch]))
        every = torch.arange(capacity)
        np.testing.assert_array_equal(tree.get(every).numpy(), values)
        np.testing.assert_array_equal(tree.values.numpy(), values)
        assert tree.total == pytest.approx(values.sum(), rel=1e-13)
        for mine, fresh in zip(inside(tree), inside(make(values)), strict=True):
            np.testing.assert_array_equal(mine, fresh)  # to the bit, whatever was there before
        if tree.total > 0:
            assert (tree.get(tree.sample(numbers(0.0, *uniform, LAST))[0]) > 0).all()

    check()


def test_last_of_equal_indices_counts() -> None:
    tree = SumTree(100_003)
    index = torch.tensor([70_000, 5, 70_000, 70_001, 5, 70_000])
    tree.set(index, numbers(1, 2, 3, 4, 5, 6))
    assert tree.get(torch.tensor([5, 70_000, 70_001])).tolist() == [5, 6, 4]
    assert tree.total == 15


@pytest.mark.usefixtures("shape")
@pytest.mark.parametrize("capacity", [7, 1_000, 100_003])
def test_zeros_are_never_drawn_despite_rounding(capacity: int) -> None:
    """Values over 30 orders of magnitude between zeros, with numbers on both sides of every boundary."""
    rng = np.random.default_rng(capacity)
    for scale in (0.0, 3.0, 30.0):
        values = np.exp(rng.normal(size=capacity) * scale) * (rng.random(capacity) < 0.2)
        values[rng.integers(capacity)] = 1.0
        values[capacity // 2 + 1 :] *= rng.random() < 0.5  # a tail of zeros, or none
        if not values.any():
            continue
        tree, borders = make(values), np.cumsum(values) / values.sum()
        sides = np.concatenate([[0.0, LAST], borders, np.nextafter(borders, 0), np.nextafter(borders, 2)])
        drawn = tree.sample(torch.from_numpy(np.clip(sides, 0.0, LAST)))[0]
        assert (tree.get(drawn) > 0).all()
        assert drawn.max() < capacity


@pytest.mark.usefixtures("shape")
@pytest.mark.parametrize("value", [5e-324, 1e-300, 0.1, 1e300])
def test_one_value_among_zeros_is_always_drawn(value: float) -> None:
    for at in (0, 48, 499, 999):
        tree = SumTree(1_000)
        tree.set(torch.tensor([at]), numbers(value))
        assert tree.sample(numbers(0.0, 0.5, LAST))[0].tolist() == [at] * 3


def test_float32_one_draws_the_last_value() -> None:
    """(255 + uniform) / 256 may round to 1 in float32."""
    tree = SumTree(100_003)
    tree.set(torch.arange(60_000), torch.full((60_000,), 0.1))
    assert tree.sample(torch.ones(1))[0].tolist() == [59_999]


def test_float32_numbers_are_multiplied_in_float64() -> None:
    values = np.ones(100_003)
    uniform = torch.rand(5_000, generator=torch.Generator().manual_seed(0))
    drawn = make(values).sample(uniform)[0]
    np.testing.assert_array_equal(drawn.numpy(), np.floor(uniform.numpy().astype(np.float64) * len(values)))


@pytest.mark.usefixtures("shape")
def test_draws_are_proportional_to_values() -> None:
    """Chi-square with 999 degrees of freedom: mean 999, standard deviation √1998."""
    generator, count = torch.Generator().manual_seed(0), 400_000
    values = np.random.default_rng(0).random(1_000) ** 3 + 0.02
    drawn = make(values).sample(torch.rand(count, generator=generator, dtype=torch.float64))[0]
    seen, expected = np.bincount(drawn.numpy(), minlength=1_000), values / values.sum() * count
    assert abs(((seen - expected) ** 2 / expected).sum() - 999) < 4 * np.sqrt(2 * 999)


@pytest.mark.parametrize("capacity", [1_000, 100_003])
def test_the_order_of_calls_does_not_matter(capacity: int) -> None:
    """One tree is written forwards with reads in between, one backwards, and one at once."""
    rng = np.random.default_rng(0)
    values, uniform = rng.random(capacity) ** 9, torch.from_numpy(rng.random(5_000))
    one, other, order = make(rng.random(capacity)), SumTree(capacity), rng.permutation(capacity)
    for part in np.array_split(order, 50):
        one.sample(uniform[:9])[0]
        one.set(torch.from_numpy(part), torch.from_numpy(values[part]))
    few = order[:200]
    other.set(torch.from_numpy(order[200:]), torch.from_numpy(values[order[200:]]))
    for i in few[::-1]:
        other.set(torch.tensor([i]), numbers(values[i]))
    for tree in (one, other):
        for mine, fresh in zip(inside(tree), inside(make(values)), strict=True):
            np.testing.assert_array_equal(mine, fresh)
    drawn = one.sample(uniform)[0]
    np.testing.assert_array_equal(drawn, other.sample(uniform)[0])
    backwards = torch.cat([one.sample(x)[0] for x in uniform.flip(0).split(7)]).flip(0)  # nor do their neighbours
    np.testing.assert_array_equal(drawn, backwards)


def test_values_are_the_whole_state() -> None:
    rng = np.random.default_rng(0)
    tree = SumTree(100_003)
    for _ in range(30):
        tree.set(torch.from_numpy(rng.integers(0, 100_003, 256)), torch.from_numpy(rng.random(256, np.float32)))
    again = make(tree.values.clone().numpy())
    assert again.total == tree.total
    for mine, fresh in zip(inside(tree), inside(again), strict=True):
        np.testing.assert_array_equal(mine, fresh)


def test_rounding_errors_do_not_accumulate() -> None:
    """Incremental sums would keep rounding errors of large values that were removed."""
    tree, rng = make(np.full(100_003, 0.1)), np.random.default_rng(0)
    for _ in range(100):
        index = torch.from_numpy(rng.integers(0, 100_003, 10_000))
        tree.set(index, torch.from_numpy(rng.random(10_000) * 1e15))
        tree.set(index, torch.full((10_000,), 0.1, dtype=torch.float64))
    assert tree.total == make(np.full(100_003, 0.1)).total
    assert tree.total == pytest.approx(10_000.3, rel=1e-13)


def test_empty_index() -> None:
    tree = make(np.ones(100_003))
    none = torch.empty(0, dtype=torch.int64)
    tree.set(none, numbers())
    assert tree.total == 100_003
    assert tree.get(none).tolist() == tree.sample(numbers())[0].tolist() == []


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_invalid_values_raise_and_are_not_written(bad: float) -> None:
    tree = make(np.ones(1_000))
    with pytest.raises(ValueError, match="finite and not negative"):
        tree.set(torch.tensor([1, 2, 3]), numbers(5.0, bad, 5.0))
    assert tree.total == 1_000


def test_index_out_of_range_raises() -> None:
    tree = SumTree(100_003)
    for beyond in (100_003, 100_010, 10**6):
        with pytest.raises(IndexError):
            tree.set(torch.tensor([beyond]), numbers(1.0))
        with pytest.raises(IndexError):
            tree.get(torch.tensor([beyond]))


def test_sampling_from_zeros_raises() -> None:
    for tree in (SumTree(7), SumTree(100_003), make(np.full(2, 1e308))):
        with pytest.raises(ValueError, match="Nothing can be drawn"):
            tree.sample(numbers(0.5))[0]
