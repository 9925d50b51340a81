# mypy: disable-error-code="no-untyped-call"
"""Policy and value losses, and means over real rows."""

from __future__ import annotations

import math

import numpy as np
import ops_reference as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.ops import policy_gradient as pg

nan = math.nan


@given(st.floats(-3, 3), st.floats(-5, 5), st.floats(0.01, 0.9))
def test_ppo_clip_loss_by_cases(log_ratio: float, advantage: float, clip: float) -> None:
    expected = reference.ppo_clip_loss(math.exp(log_ratio), advantage, clip)
    x = torch.tensor([log_ratio], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    for given_clip in (clip, torch.tensor(clip, dtype=torch.float64)):
        assert pg.ppo_clip_loss(*x, given_clip).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [(1.0, 1.0, True), (1.3, 1.0, False), (0.7, 1.0, True), (1.3, -1.0, True), (0.7, -1.0, False)],
)
def test_ppo_gradient_stops_where_the_ratio_has_moved_enough(ratio: float, advantage: float, learns: bool) -> None:
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    pg.ppo_clip_loss(log_ratio, torch.tensor([advantage]), 0.2).sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(-ratio * advantage if learns else 0.0)


def test_ppo_at_ratio_one_has_the_gradient_of_the_policy_gradient() -> None:
    log_prob, advantage = torch.randn(5, requires_grad=True), torch.randn(5)
    (a,) = torch.autograd.grad(pg.ppo_clip_loss(log_prob - log_prob.detach(), advantage, 0.2).sum(), log_prob)
    (b,) = torch.autograd.grad(pg.policy_gradient_loss(log_prob, advantage).sum(), log_prob)
    torch.testing.assert_close(a, b)


def test_value_losses() -> None:
    value, old, target = torch.tensor([1.0, 3.0, 0.9]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, 2.9, 0.0])
    torch.testing.assert_close(pg.value_loss(value, target), torch.tensor([1.0, 0.01, 0.81]))
    for clip in (0.5, torch.tensor(0.5)):
        loss = pg.clipped_value_loss(value, old, target, clip)
        torch.testing.assert_close(loss, torch.tensor([1.0, 1.4**2, 0.81]))


def test_no_gradient_reaches_targets() -> None:
    x = {k: torch.randn(4, requires_grad=True) for k in ("prediction", "advantage", "target", "old")}
    losses = [
        pg.policy_gradient_loss(x["prediction"], x["advantage"]),
        pg.ppo_clip_loss(x["prediction"], x["advantage"], 0.2),
        pg.value_loss(x["prediction"], x["target"]),
        pg.clipped_value_loss(x["prediction"], x["old"], x["target"], 0.1),
    ]
    torch.stack(losses).sum().backward()
    assert x["prediction"].grad is not None
    assert all(x[k].grad is None for k in ("advantage", "target", "old"))


def test_approx_kl_estimates_the_kl() -> None:
    old, new = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    per_action = pg.approx_kl((new / old).log())
    assert (per_action >= 0).all()
    expected = (old * (old / new).log()).sum()
    torch.testing.assert_close((old * per_action).sum(), expected)
    assert pg.approx_kl(torch.tensor(1e-4)).item() == pytest.approx(5e-9, rel=0.05)


def test_clip_fraction_and_entropy() -> None:
    ratio = torch.tensor([0.7, 0.85, 1.0, 1.15, 1.3])
    assert pg.clip_fraction(ratio.log(), 0.2).tolist() == [1, 0, 0, 0, 1]
    assert pg.clip_fraction(ratio.log(), torch.tensor(0.1)).tolist() == [1, 1, 0, 1, 1]
    assert pg.entropy_loss(torch.tensor([2.0])).tolist() == [-2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalize_over_real_rows(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(3, 5, (8, 4))
    real = rng.random((8, 4)) < 0.6
    expected = (x - x[real].mean()) / x[real].std()
    x[~real] = 1e3  # padding must not matter
    (result,), (share,) = pg.normalize_each([torch.tensor(x, dtype=dtype)], [torch.tensor(real).to(dtype)])
    assert result.dtype == share.dtype == dtype
    assert torch.equal(share, pg.shares(torch.tensor(real).to(dtype)))
    np.testing.assert_allclose(result.numpy()[real], expected[real], rtol=1e-5, atol=1e-5)
    assert (result * share).sum().abs() < 1e-5


@pytest.mark.parametrize(
    ("x", "weight"),
    [([5.0, 9.0], [1, 0]), ([3.0, 3.0], [1, 1]), ([7.0, 8.0], [0, 0]), ([0.0, 0.0], [1, 1])],
    ids=["one row", "all equal", "no row", "zeros"],
)
def test_normalize_without_variance_is_zero(x: list[float], weight: list[float]) -> None:
    given_x, real = torch.tensor(x, requires_grad=True), torch.tensor(weight, dtype=torch.float32)
    (result,), (share,) = pg.normalize_each([given_x], [real])
    assert (result * share).tolist() == [0, 0]
    (result * share).sum().backward()
    assert given_x.grad is not None
    assert given_x.grad.isfinite().all()


def minibatches(sizes: tuple[int, ...], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    values = [torch.randn(1, n, generator=g) * 3 + 50 * seed for n in sizes]
    return values, [(torch.rand(1, n, generator=g) < 0.7).float() for n in sizes]


def test_minibatches_of_one_rank_are_normalized_one_by_one_to_the_bit() -> None:
    values, real = minibatches((64, 64, 63), 1)
    normalized, share = pg.normalize_each(values, real)
    pooled = pg.normalize_each(values, real, sum_over_ranks=lambda x: x)
    assert all(map(torch.equal, (*normalized, *share), (*pooled[0], *pooled[1])))
    for x, rows, result, of_rows in zip(values, real, normalized, share, strict=True):
        expected = rows / rows.sum().clamp(min=1)
        centred = x - (x * expected).sum()
        variance = (centred.square() * expected).sum()
        assert torch.equal(of_rows, expected)
        assert torch.equal(result, centred * (variance + 1e-16).rsqrt())
    assert all(map(torch.equal, share, pg.shares_of_each(real)))


def test_minibatches_of_two_ranks_are_normalized_as_their_rows_together_by_one_sum() -> None:
    (values, real), (others, others_real) = minibatches((40, 41), 0), minibatches((90, 3), 1)
    given: list[torch.Tensor] = []
    for x, rows in ((values, real), (others, others_real)):
        pg.normalize_each(x, rows, sum_over_ranks=lambda term: given.append(term) or term)
    assert len(given) == 2
    normalized, share = pg.normalize_each(values, real, sum_over_ranks=lambda _: given[0] + given[1])
    for i, x in enumerate(values):
        together = torch.cat([x, others[i]], 1), torch.cat([real[i], others_real[i]], 1)
        (expected,), (expected_share,) = pg.normalize_each([together[0]], [together[1]])
        torch.testing.assert_close(normalized[i], expected[:, : x.shape[1]], rtol=1e-5, atol=1e-5)
        assert torch.equal(share[i], expected_share[:, : x.shape[1]])


def test_shares_make_a_mean_over_real_rows() -> None:
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    x = torch.tensor([[1.0, 50.0], [3.0, 70.0]])
    share = pg.shares(weight)
    assert (x * share).sum().item() == pg.share_sum(x, share).item() == 2
    assert pg.shares(torch.zeros(3)).tolist() == [0, 0, 0]


def test_shares_over_ranks() -> None:
    real = torch.tensor([[True, False, True], [True, True, False]])
    assert pg.shares(real).tolist() == [[0.25, 0, 0.25], [0.25, 0.25, 0]]
    assert pg.shares(real, lambda count: 2 * count).tolist() == [[0.125, 0, 0.125], [0.125, 0.125, 0]]
    assert pg.shares(torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_explained_variance() -> None:
    target, weight = torch.tensor([1.0, 2.0, 4.0, nan]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert pg.explained_variance(target + 7, target, weight).item() == pytest.approx(1)
    assert pg.explained_variance(torch.zeros(4), target, weight).item() == pytest.approx(0)
    assert pg.explained_variance(-target, target, weight).item() == pytest.approx(-3)
    assert pg.explained_variance(target, torch.ones(4), weight).item() == 0
    half = torch.tensor([1.0, 2.0, 3.0, 0.0])
    expected = 1 - np.var([0, 0, 1]) / np.var([1, 2, 4])
    assert pg.explained_variance(half, target, weight).item() == pytest.approx(expected)
