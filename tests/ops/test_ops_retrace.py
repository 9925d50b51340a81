# mypy: disable-error-code="no-untyped-call,arg-type"
"""Retrace against its definition and trfl's example; ACER's policy gradient against its equation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import ops_off_policy_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ludus.ops.distributions import mask_logits
from ludus.ops.q_learning import gather_action
from ludus.ops.retrace import acer_policy_loss, acer_weights, retrace
from ludus.ops.returns import lambda_returns, n_step_returns

nan = math.nan


def close(actual: Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=rtol, atol=atol)


def data_of(seed: int, time: int, batch: int) -> dict[str, Tensor]:
    return {name: torch.tensor(x) for name, x in reference.off_policy_rollout(seed, time, batch).items()}


@given(
    seed=st.integers(0, 10_000),
    time=st.integers(1, 20),
    batch=st.integers(1, 3),
    lambda_=st.floats(0, 1),
    c_bar=st.sampled_from([1.0, 2.2]),
)
@settings(max_examples=60, deadline=None)
def test_retrace(seed: int, time: int, batch: int, lambda_: float, c_bar: float) -> None:
    data = reference.off_policy_rollout(seed, time, batch)
    expected = reference.retrace(**data, lambda_=lambda_, c_bar=c_bar)
    close(retrace(**data_of(seed, time, batch), lambda_=lambda_, c_bar=c_bar), expected)
    per_row = torch.full((time, batch), lambda_, dtype=torch.float64)
    close(retrace(**data_of(seed, time, batch), lambda_=per_row, c_bar=c_bar), expected)


def test_trfl_retrace() -> None:
    q = torch.tensor([[[2.0, 3, 4], [5, 6, 7]], [[7, 6, 5], [4, 3, 2]], [[3, 5, 7], [4, 6, 9]], [[2, 8, 4], [9, 1, 8]]])
    action = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 0]])
    pi = torch.tensor(
        [
            [[nan, nan, nan], [nan, nan, nan]],
            [[0.41, 0.28, 0.31], [0.19, 0.77, 0.04]],
            [[0.22, 0.44, 0.34], [0.14, 0.25, 0.61]],
            [[0.16, 0.72, 0.12], [0.33, 0.30, 0.37]],
        ]
    )
    mu = torch.tensor([[nan, nan], [0.85, 0.86], [0.87, 0.88], [0.89, 0.84]])
    reward = torch.tensor([[1.9, 2.9], [3.9, 4.9], [5.9, 6.9]])
    discount = torch.tensor([[0.8, 0.9], [0.7, 0.8], [0.6, 0.5]])
    log_ratio, value = (gather_action(pi, action) / mu).log(), (pi * q).sum(-1)
    result = retrace(
        log_ratio[:3], reward, discount, torch.ones(3, 2), gather_action(q, action)[:3], value[1:], lambda_=0.9
    )
    last = [5.9 + 0.6 * 6.56, 6.9 + 0.5 * 6.23]
    middle = [
        3.9 + 0.7 * 5.24 + 0.9 * 0.7 * 0.22 / 0.87 * (last[0] - 3),
        4.9 + 0.8 * 7.55 + 0.9 * 0.8 * 0.25 / 0.88 * (last[1] - 6),
    ]
    first = [
        1.9 + 0.8 * 6.1 + 0.9 * 0.8 * 0.28 / 0.85 * (middle[0] - 6),
        2.9 + 0.9 * 3.15 + 0.9 * 0.9 * 0.04 / 0.86 * (middle[1] - 2),
    ]
    close(result, [first, middle, last], 1e-6)


def test_retrace_on_policy_and_deterministic_is_the_lambda_return() -> None:
    data = data_of(1, 30, 4)
    data["log_ratio"].zero_()
    rest = {k: data[k] for k in ("reward", "discount", "continues")}
    value_t = data["value_t"].clone()  # where one action has all of π, V(s_{t+1}) is Q(s_{t+1}, a_{t+1})
    value_t[:-1] = torch.where(rest["continues"][:-1] == 1, data["q_tm1"][1:], value_t[:-1])
    data["value_t"] = value_t
    close(retrace(**data, lambda_=0.8), lambda_returns(**rest, value_t=value_t, lambda_=0.8))
    close(retrace(**data, lambda_=0.0), n_step_returns(**rest, value_t=value_t, n=1))


def test_retrace_uses_the_ratio_of_the_next_step() -> None:
    ones = torch.ones(2, 1)
    log_ratio = torch.tensor([[0.0], [-math.inf]])  # π never takes the second action
    result = retrace(log_ratio, ones, 0.5 * ones, ones, torch.zeros(2, 1), 10 * ones)
    assert result.tolist() == [[6.0], [6.0]]
    result = retrace(log_ratio.flip(0), ones, 0.5 * ones, ones, torch.zeros(2, 1), 10 * ones)
    assert result.tolist() == [[9.0], [6.0]]


def test_nan_in_padding_and_hidden_values_is_ignored() -> None:
    data = data_of(5, 20, 3)
    after_ending = torch.zeros(20, 3, dtype=torch.bool)
    after_ending[1:] = (data["continues"][:-1] == 0) & (data["continues"][1:] == 0)
    dirty = {name: x.clone() for name, x in data.items()}
    for name in ("reward", "q_tm1", "log_ratio"):
        dirty[name][after_ending] = nan
    dirty["value_t"][data["discount"] == 0] = nan
    assert after_ending.any()
    assert torch.equal(retrace(**data)[~after_ending], retrace(**dirty)[~after_ending])


def test_no_gradient_reaches_targets_and_weights() -> None:
    data = {name: x.requires_grad_() for name, x in data_of(2, 6, 2).items()}
    assert not retrace(**data).requires_grad
    log_p = torch.randn(6, 2, 3).log_softmax(-1).requires_grad_()
    weights = torch.randn(6, 2, 3, requires_grad=True)
    acer_policy_loss(log_p, weights).sum().backward()
    assert weights.grad is None
    assert log_p.grad is not None
    assert torch.equal(log_p.grad, -weights)


# ACER.


@given(
    seed=st.integers(0, 10_000), batch=st.integers(1, 4), choices=st.integers(2, 5), c=st.sampled_from([0.5, 1.0, 3.0])
)
@settings(max_examples=40, deadline=None)
def test_acer_gradient(seed: int, batch: int, choices: int, c: float) -> None:
    rng = np.random.default_rng(seed)
    logits, q = rng.normal(0, 1.5, (2, batch, choices)), rng.normal(size=(2, batch, choices))
    log_mu = reference.log_softmax(rng.normal(0, 1.5, (2, batch, choices)))
    action, q_ret = rng.integers(0, choices, (2, batch)), rng.normal(size=(2, batch))
    value = (np.exp(reference.log_softmax(logits)) * q).sum(-1)
    leaf = torch.tensor(logits, requires_grad=True)
    log_p = leaf.log_softmax(-1)
    arrays = (torch.tensor(x) for x in (log_mu, action, q_ret, q, value))
    weights = acer_weights(log_p, *arrays, c)
    assert not weights.requires_grad
    acer_policy_loss(log_p, weights).sum().backward()
    assert leaf.grad is not None
    for i in np.ndindex(2, batch):
        expected = reference.acer_gradient(logits[i], log_mu[i], action[i], q_ret[i], q[i], value[i], c)
        close(-leaf.grad[i], expected)


def test_truncation_and_correction_together_are_unbiased() -> None:
    """With Q^ret = Q, the expectation over μ of the estimate is the gradient itself, whatever c is (eq. 7)."""
    torch.manual_seed(0)
    log_p, log_mu = (torch.randn(4, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    q = torch.randn(4, dtype=torch.float64)
    value = (log_p.exp() * q).sum()
    exact = log_p.exp() * (q - value)
    for c in (0.1, 1.0, 100.0):
        every = torch.arange(4)
        rows = (x.expand(4, 4) for x in (log_p, log_mu))
        weights = acer_weights(*rows, every, q, q.expand(4, 4), value.expand(4), c)
        close((log_mu.exp().unsqueeze(-1) * weights).sum(0), exact)


def test_acer_on_policy_has_no_correction() -> None:
    log_p, q = torch.randn(5, 3).log_softmax(-1), torch.randn(5, 3)
    action, q_ret, value = torch.tensor([0, 1, 2, 0, 1]), torch.randn(5), torch.randn(5)
    weights = acer_weights(log_p, log_p, action, q_ret, q, value, 1.0)
    expected = torch.zeros(5, 3).scatter(-1, action.unsqueeze(-1), (q_ret - value).unsqueeze(-1))
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("c", [0.5, 10.0])
def test_masked_and_extreme_choices_stay_finite(c: float) -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    logits = torch.tensor([[0.2, 3.0, 0.1], [300.0, 0.0, -300.0]], requires_grad=True)
    log_p = mask_logits(logits, mask).log_softmax(-1)
    log_mu = mask_logits(torch.tensor([[0.3, 1.0, 0.0], [-300.0, 0.0, 300.0]]), mask).log_softmax(-1)
    q = torch.tensor([[1.0, nan, 2.0], [1.0, 2.0, 3.0]])
    weights = acer_weights(log_p, log_mu, torch.tensor([2, 2]), torch.ones(2), q, torch.zeros(2), c)
    assert weights.isfinite().all()
    assert weights[0, 1] == 0
    (gradient,) = torch.autograd.grad(acer_policy_loss(log_p, weights).sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0
