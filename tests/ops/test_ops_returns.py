# mypy: disable-error-code="no-untyped-call,arg-type"
"""Scan, returns, advantages and V-trace against the definitions, and against numbers from other projects' tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import ops_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ludus.ops.returns import gae, lambda_returns, n_step_returns
from ludus.ops.scan import linear_scan
from ludus.ops.vtrace import vtrace

KEYS = ("reward", "discount", "continues", "value_t")
sizes = {"seed": st.integers(0, 10_000), "time": st.integers(1, 40), "batch": st.integers(1, 3)}


def tensors(arrays: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: torch.as_tensor(x, dtype=dtype) for name, x in arrays.items()}


def columns(*rows: list[float]) -> Tensor:
    """Sequences side by side: ``[T, B]``."""
    return torch.tensor(rows, dtype=torch.float64).T


def close(actual: Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=rtol, atol=atol)


# The scan.


@given(**sizes, bootstraps=st.booleans())
@settings(max_examples=60, deadline=None)
def test_scan_equals_the_recurrence(seed: int, time: int, batch: int, bootstraps: bool) -> None:
    rng = np.random.default_rng(seed)
    x, decay, last = rng.normal(size=(time, batch)), rng.random((time, batch)), rng.normal(size=batch)
    decay[rng.random((time, batch)) < 0.2] = 0
    last = last if bootstraps else np.zeros(batch)
    given_last = torch.tensor(last) if bootstraps else None
    close(linear_scan(torch.tensor(x), torch.tensor(decay), given_last), reference.linear_scan(x, decay, last))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scan_keeps_dtype_and_trailing_dimensions(dtype: torch.dtype) -> None:
    x, decay = torch.randn(128, 2, 3, dtype=dtype), torch.rand(128, 2, 3, dtype=dtype)
    y = linear_scan(x, decay)
    assert y.dtype == dtype
    expected = reference.linear_scan(x.double().numpy(), decay.double().numpy(), np.zeros((2, 3)))
    close(y.double(), expected, 1e-5, 1e-5)


def test_scan_does_not_modify_inputs() -> None:
    x, decay = torch.randn(9, 2), torch.rand(9, 2)
    before = x.clone(), decay.clone()
    linear_scan(x, decay, torch.randn(2))
    assert torch.equal(x, before[0])
    assert torch.equal(decay, before[1])


def test_scan_gradient() -> None:
    x, decay = torch.randn(7, 2, dtype=torch.float64), torch.rand(7, 2, dtype=torch.float64) + 0.1
    last = torch.randn(2, dtype=torch.float64)
    assert torch.autograd.gradcheck(linear_scan, [v.requires_grad_() for v in (x, decay, last)])


@pytest.mark.parametrize("cut", range(6))
def test_nan_does_not_pass_a_zero_decay(cut: int) -> None:
    x, decay = torch.randn(7, dtype=torch.float64), torch.full((7,), 0.9, dtype=torch.float64)
    decay[cut] = 0
    expected = linear_scan(x[: cut + 1], decay[: cut + 1]).clone()
    x[cut + 1 :] = torch.nan
    x, decay = x.requires_grad_(), decay.requires_grad_()
    y = linear_scan(x, decay, torch.tensor(torch.nan, dtype=torch.float64))
    close(y[: cut + 1], expected)
    assert y[cut + 1 :].isnan().all()
    for gradient in torch.autograd.grad(y[: cut + 1].sum(), [x, decay]):
        assert gradient[: cut + 1].isfinite().all()


# Definitions.


@given(**sizes, n=st.integers(1, 45))
@settings(max_examples=60, deadline=None)
def test_n_step_returns(seed: int, time: int, batch: int, n: int) -> None:
    data = {k: v for k, v in reference.rollout(seed, time, batch).items() if k in KEYS}
    close(n_step_returns(**tensors(data), n=n), reference.n_step_returns(**data, n=n))


@given(**sizes, lambda_=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_lambda_returns(seed: int, time: int, batch: int, lambda_: float) -> None:
    data = {k: v for k, v in reference.rollout(seed, time, batch).items() if k in KEYS}
    expected = reference.lambda_returns(**data, lambda_=lambda_)
    close(lambda_returns(**tensors(data), lambda_=lambda_), expected)
    per_row = torch.full((time, batch), lambda_, dtype=torch.float64)
    close(lambda_returns(**tensors(data), lambda_=per_row), expected)


@given(**sizes, lambda_=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_gae(seed: int, time: int, batch: int, lambda_: float) -> None:
    data = reference.rollout(seed, time, batch)
    advantage = gae(**tensors(data), lambda_=lambda_)
    close(advantage, reference.gae(**data, lambda_=lambda_))
    value_tm1 = data.pop("value_tm1")
    close(advantage + torch.tensor(value_tm1), lambda_returns(**tensors(data), lambda_=lambda_))


@given(**sizes, lambda_=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_vtrace(seed: int, time: int, batch: int, lambda_: float) -> None:
    data = reference.rollout(seed, time, batch)
    data["log_ratio"] = np.random.default_rng(seed).uniform(-2.5, 2.5, (time, batch))
    options = {"rho_bar": 3.7, "c_bar": 2.2, "lambda_": lambda_, "pg_rho_bar": 5.1}
    expected = reference.vtrace(**data, **options)
    for name, x in vtrace(**tensors(data), **options)._asdict().items():
        close(x, expected[name], rtol=1e-6)


def test_vtrace_without_a_weight_of_the_advantage() -> None:
    data = tensors(reference.rollout(1, 30, 4))
    log_ratio = torch.linspace(-1, 1, 120, dtype=torch.float64).view(30, 4)
    plain, weighted = (vtrace(log_ratio, **data, lambda_=0.8, pg_rho_bar=clip) for clip in (None, 2.0))
    close(plain.advantage * log_ratio.exp().clamp(max=2.0), weighted.advantage)
    close(plain.target, weighted.target)


def test_vtrace_on_policy_is_gae() -> None:
    data = tensors(reference.rollout(1, 30, 4))
    result = vtrace(torch.zeros(30, 4, dtype=torch.float64), **data, lambda_=0.8)
    close(result.advantage, gae(**data, lambda_=0.8))
    close(result.error, gae(**data, lambda_=0.8))


def test_float32_stays_float32_and_accurate() -> None:
    data = reference.rollout(3, 128, 8)
    advantage = gae(**tensors(data, torch.float32), lambda_=0.95)
    assert advantage.dtype == torch.float32
    close(advantage, reference.gae(**data, lambda_=0.95), 1e-4, 1e-5)


# Endings.


def test_truncation_bootstraps_and_termination_does_not() -> None:
    ends = columns([0, 1, 0], [0, 0, 0])  # the first column terminates at row 1, the second is truncated there
    data = {
        "reward": columns([1, 1, 1], [1, 1, 1]),
        "discount": 0.5 * (1 - ends),
        "continues": columns([1, 0, 1], [1, 0, 1]),
        "value_t": columns([10, 20, 30], [10, 20, 30]),
    }
    expected = columns([1.5, 1, 16], [6.5, 11, 16])
    close(n_step_returns(**data, n=3), expected)
    close(n_step_returns(**data, n=2), expected)
    close(lambda_returns(**data, lambda_=1.0), expected)
    value_tm1 = columns([3, 10, 5], [3, 10, 5])
    close(gae(**data, value_tm1=value_tm1, lambda_=1.0), expected - value_tm1)


def test_nan_in_padding_and_hidden_values_is_ignored() -> None:
    data = tensors(reference.rollout(5, 20, 3, ends=0.5))
    after_ending = torch.zeros(20, 3, dtype=torch.bool)
    after_ending[1:] = (data["continues"][:-1] == 0) & (data["continues"][1:] == 0)
    dirty = {name: x.clone() for name, x in data.items()}
    dirty["reward"][after_ending] = torch.nan
    dirty["value_tm1"][after_ending] = torch.nan
    dirty["value_t"][data["discount"] == 0] = torch.nan
    assert after_ending.any()
    log_ratio = torch.rand(20, 3, dtype=torch.float64)
    without = {k: data[k] for k in KEYS}, {k: dirty[k] for k in KEYS}
    pairs = [
        [gae(**d, lambda_=0.9) for d in (data, dirty)],
        [vtrace(log_ratio, **d).target for d in (data, dirty)],
        [vtrace(log_ratio, **d).advantage for d in (data, dirty)],
        [lambda_returns(**d, lambda_=0.9) for d in without],
        [n_step_returns(**d, n=4) for d in without],
    ]
    for clean, poisoned in pairs:
        assert torch.equal(clean[~after_ending], poisoned[~after_ending])


def test_no_gradient_reaches_targets() -> None:
    data = {name: x.requires_grad_() for name, x in tensors(reference.rollout(2, 6, 2)).items()}
    short = {k: data[k] for k in KEYS}
    results = [gae(**data, lambda_=0.9), lambda_returns(**short, lambda_=0.9), n_step_returns(**short, n=2)]
    results += vtrace(torch.zeros(6, 2, dtype=torch.float64, requires_grad=True), **data)
    assert not any(x.requires_grad for x in results)


# Numbers from other projects' tests.

RLAX = {
    "reward": columns([1.0, 0.0, -1.0, 0.0, 1.0], [0.5, 0.8, -0.7, 0.0, 2.1]),
    "discount": columns([0.5, 0.9, 1.0, 0.5, 0.8], [0.9, 0.5, 0.3, 0.8, 0.7]),
    "continues": torch.ones(5, 2, dtype=torch.float64),
}
RLAX_VALUE = columns([3.0, 1.0, 5.0, -5.0, 3.0], [-1.7, 1.2, 2.3, 2.2, 2.7])


def test_rlax_lambda_returns() -> None:
    expected = columns(
        [1.6460547, 0.72281253, 0.7375001, 0.6500001, 3.4], [0.7866317, 0.9913063, 0.1101501, 2.834, 3.99]
    )
    close(lambda_returns(**RLAX, value_t=RLAX_VALUE, lambda_=0.75), expected, 1e-5)


def test_rlax_discounted_returns() -> None:
    expected = columns([1.315, 0.63, 0.7, 1.7, 3.4], [1.33592, 0.9288, 0.2576, 3.192, 3.99])
    close(n_step_returns(**RLAX, value_t=RLAX_VALUE, n=5), expected, 1e-5)
    close(n_step_returns(**RLAX, value_t=RLAX_VALUE, n=7), expected, 1e-5)


def test_rlax_n_step_returns() -> None:
    expected = columns([2.8, -3.15, 0.7, 1.7, 3.4], [1.2155, 0.714, 0.2576, 3.192, 3.99])
    close(n_step_returns(**RLAX, value_t=RLAX_VALUE, n=3), expected, 1e-5)


@pytest.mark.parametrize(
    ("lambda_", "first", "second"),
    [
        (1.0, [-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3.0, 2.0, 1.0, 0.0, -4.9]),
        (0.7, [-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1.0, 0.0, -4.9]),
        (0.4, [0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1.0, 0.0, -4.9]),
    ],
)
def test_rlax_gae(lambda_: float, first: list[float], second: list[float]) -> None:
    value = columns([1.0, 4.0, -3.0, -2.0, -1.0, -1.0], [-3.0, -2.0, -1.0, 0.0, 5.0, -1.0])
    discount = columns([0.99] * 5, [0.9, 0.9, 0.9, 0.0, 0.9])
    reward = columns([0.0, 0.0, 1.0, 0.0, -0.5], [0.0, 0.0, 0.0, 0.0, 1.0])
    advantage = gae(reward, discount, (discount > 0).double(), value[:-1], value[1:], lambda_)
    close(advantage, columns(first, second), atol=1e-3)


def test_rlax_vtrace() -> None:
    behaviour = torch.tensor(
        [[[8.9, 0.7], [5.0, 1.0], [0.6, 0.1], [-0.9, -0.1]], [[0.3, -5.0], [1.0, -8.0], [0.3, 1.7], [4.7, 3.3]]]
    )
    target = torch.tensor(
        [[[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]], [[1.0, 0.9], [1.0, -1.0], [-4.3, 8.7], [0.8, 0.3]]]
    )
    action = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1]]).unsqueeze(-1)
    log_ratio = (target.log_softmax(-1) - behaviour.log_softmax(-1)).gather(-1, action).squeeze(-1).double().T
    reward = columns([-1.3, -1.3, 2.3, 42.0], [1.3, 5.3, -3.3, -5.0])
    discount = columns([0.0, 0.89, 0.85, 0.99], [0.88, 1.0, 0.83, 0.95])
    value = columns([2.1, 1.1, -3.1, 0.0, 8.4], [3.1, 0.1, -1.1, 7.4, -1.2])
    result = vtrace(log_ratio, reward, discount, torch.ones_like(reward), value[:-1], value[1:])
    expected = columns([-1.6155143, -3.4973226, 1.8670533, 50.316], [1.4662437, 3.6116405, -8.3327293e-5, -13.54])
    close(result.error, expected, 1e-3)
    close(result.advantage, expected, 1e-3)
    close(result.target, expected + value[:-1], 1e-3)


@pytest.mark.parametrize(
    ("truncated", "expected"),
    [
        (
            [],
            [
                454.8344,
                376.1143,
                291.298,
                200.0,
                464.5610,
                383.1085,
                295.387,
                201.0,
                474.2876,
                390.1027,
                299.476,
                202.0,
            ],
        ),
        (
            [3, 7],
            [
                454.0109,
                375.2386,
                290.3669,
                199.01,
                462.9138,
                381.3571,
                293.5248,
                199.02,
                474.2876,
                390.1027,
                299.476,
                202.0,
            ],
        ),
    ],
)
def test_tianshou_gae_with_truncation(truncated: list[int], expected: list[float]) -> None:
    value_t = columns([2.0, 3.0, 4.0, -1.0, 5.0, 6.0, 7.0, -2.0, 8.0, 9.0, 10.0, -3.0])
    value_tm1 = value_t.roll(1, 0)
    reward = columns([101, 102, 103, 200, 104, 105, 106, 201, 107, 108, 109, 202])
    done = columns([0, 0, 0, 1] * 3)
    terminated = done.clone()
    terminated[truncated] = 0
    advantage = gae(reward, 0.99 * (1 - terminated), 1 - done, value_tm1, value_t, 0.95)
    close(advantage + value_tm1, columns(expected), 1e-5)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [2.6, 3.6, 4.4, 5.3, 6.2, 8.0, 8.0, 8.9, 9.8, 12.0]),
        (2, [3.36, 3.6, 5.53, 6.62, 7.8, 8.0, 9.89, 10.98, 12.2, 12.0]),
        (10, [3.36, 3.6, 5.678, 6.78, 7.8, 8.0, 10.122, 11.22, 12.2, 12.0]),
    ],
)
def test_tianshou_n_step_returns(n: int, expected: list[float]) -> None:
    reward = columns([3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    done = columns([0, 1, 0, 0, 0, 1, 0, 0, 0, 1])
    terminated = done.clone()
    terminated[1] = 0  # a truncation
    value_t = -reward.roll(-1, 0)
    value_t[1] = -reward[1]  # that buffer takes an ending's successor to be the ending itself
    close(n_step_returns(reward, 0.1 * (1 - terminated), 1 - done, value_t, n), columns(expected), 1e-6)
