# mypy: disable-error-code="no-untyped-call,arg-type"
"""Targets, losses and priorities of action values against their equations, and numbers from other projects' tests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import ops_off_policy_reference as reference
import ops_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ludus.ops import q_learning as ops
from ludus.ops.distributions import mask_logits

nan = math.nan
sizes = {"seed": st.integers(0, 10_000), "batch": st.integers(1, 5), "choices": st.integers(1, 6)}


def close(actual: Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=rtol, atol=atol)


def masks(rng: np.random.Generator, batch: int, choices: int) -> np.ndarray[Any, Any]:
    """At least one choice of each row is allowed."""
    mask = rng.random((batch, choices)) < 0.6
    mask[np.arange(batch), rng.integers(0, choices, batch)] = True
    return mask


# Choices.


@given(**sizes)
@settings(max_examples=40, deadline=None)
def test_max_and_double_q_values_with_masks(seed: int, batch: int, choices: int) -> None:
    rng = np.random.default_rng(seed)
    q, online = rng.normal(size=(2, batch, choices)) - 5, rng.normal(size=(2, batch, choices))
    mask = np.stack([masks(rng, batch, choices) for _ in range(2)])
    for allowed in (np.ones_like(mask), mask):
        dirty = [torch.tensor(np.where(allowed, x, nan)) for x in (q, online)]
        index = np.array([[reference.best(online[t, b], allowed[t, b]) for b in range(batch)] for t in range(2)])
        expected = np.take_along_axis(q, index[..., None], -1)[..., 0]
        for given_mask in (torch.tensor(allowed), torch.tensor(allowed).float()):
            close(ops.double_q_value(dirty[0], dirty[1], given_mask), expected)
            close(ops.max_q_value(dirty[0], given_mask), np.where(allowed, q, -np.inf).max(-1))
            assert ops.greedy(dirty[1], given_mask).tolist() == index.tolist()
    close(ops.max_q_value(torch.tensor(q)), q.max(-1))
    close(ops.double_q_value(torch.tensor(q), torch.tensor(q)), q.max(-1))


def test_value_is_finite_without_valid_actions() -> None:
    q, nothing = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)
    assert ops.max_q_value(q, nothing).isfinite().all()
    assert ops.double_q_value(q, q, nothing).isfinite().all()
    assert ops.munchausen_value(q, 0.03, nothing).isfinite().all()


def test_rlax_q_learning() -> None:
    reward, discount = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])
    q_tm1, action = torch.tensor([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0]]), torch.tensor([0, 1])
    q_t = torch.tensor([[0.0, 1.0, 0.0], [1.0, 2.0, 0.0]])
    td = ops.td_target(reward, discount, ops.max_q_value(q_t)) - ops.gather_action(q_tm1, action)
    assert td.tolist() == [0, 1]
    value, selector = torch.tensor([[99.0, 1, 98], [91, 2, 66]]), torch.tensor([[2.0, 10, 1], [11, 20, 1]])
    td = ops.td_target(reward, discount, ops.double_q_value(value, selector)) - ops.gather_action(q_tm1, action)
    assert td.tolist() == [0, 1]


def test_gather_action_with_one_and_several_critics() -> None:
    q, action = torch.randn(3, 4, 2, 5), torch.randint(5, (3, 4))
    both = ops.gather_action(q, action)
    assert both.shape == (3, 4, 2)
    for t, b in np.ndindex(3, 4):
        assert both[t, b].tolist() == q[t, b, :, action[t, b]].tolist()
    assert torch.equal(ops.gather_action(q[:, :, 0], action), both[..., 0])


@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize("choices", [1, 2, 5])
@pytest.mark.parametrize("atoms", [0, 1, 4])
def test_dueling(leading: tuple[int, ...], choices: int, atoms: int) -> None:
    last = (atoms,) if atoms else ()
    value = torch.randn(*leading, 1, *last, dtype=torch.float64)
    advantage = torch.randn(*leading, choices, *last, dtype=torch.float64)
    q = ops.dueling(value, advantage)
    axis = -2 if atoms else -1
    close(q, value.numpy() + advantage.numpy() - advantage.numpy().mean(axis, keepdims=True))
    assert q.shape == advantage.shape
    close(q.mean(axis, keepdim=True), value)  # the mean of Q is V


# Targets.


def test_td_target_ignores_values_with_zero_discount() -> None:
    reward, discount = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.0]])
    assert ops.td_target(reward, discount, torch.tensor([[4.0, nan]])).tolist() == [[3.0, 2.0]]
    atoms = ops.td_target(reward.unsqueeze(-1), discount.unsqueeze(-1), torch.tensor([-2.0, 0.0, 2.0]))
    assert atoms.tolist() == [[[0, 1, 2], [2, 2, 2]]]


@given(st.floats(-1e6, 1e6), st.sampled_from([0.0, 1e-3, 1e-2, 0.5]))
@settings(max_examples=200)
def test_rescale_and_its_inverse(x: float, eps: float) -> None:
    double = torch.tensor(x, dtype=torch.float64)
    y = ops.rescale(double, eps)
    assert y.item() == pytest.approx(reference.rescale(x, eps), rel=1e-9, abs=1e-12)
    assert ops.unrescale(y, eps).item() == pytest.approx(x, rel=1e-9, abs=1e-300)


def test_rescale_is_accurate_in_float32() -> None:
    exact = torch.logspace(-30, 7, 500, dtype=torch.float64)
    exact = torch.cat([exact, -exact, torch.zeros(1, dtype=torch.float64)])
    x = exact.float()
    for result, expected in [
        (ops.rescale(x), ops.rescale(x.double())),
        (ops.unrescale(x), ops.unrescale(x.double())),
        (ops.unrescale(ops.rescale(x)), x.double()),
    ]:
        assert result.dtype == torch.float32
        close(result.double(), expected, 1e-6, 0)


def test_rescale_gradient() -> None:
    x = torch.tensor([-3.0, -1e-3, 0.0, 1e-3, 40.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.rescale, [x])
    assert torch.autograd.gradcheck(ops.unrescale, [x])


@given(seed=st.integers(0, 10_000), time=st.integers(1, 20), batch=st.integers(1, 3), n=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_n_step_targets(seed: int, time: int, batch: int, n: int) -> None:
    data = ops_reference.rollout(seed, time, batch)
    del data["value_tm1"]
    given_data = {name: torch.tensor(x) for name, x in data.items()}
    given_data["value_t"][given_data["discount"] == 0] = nan
    close(ops.n_step_targets(**given_data, n=n), ops_reference.n_step_returns(**data, n=n))
    squeezed = given_data | {"value_t": ops.rescale(given_data["value_t"], 1e-2)}
    expected = np.vectorize(reference.rescale)(ops_reference.n_step_returns(**data, n=n), 1e-2)
    close(ops.n_step_targets(**squeezed, n=n, eps=1e-2), expected)


@given(**sizes, tau=st.floats(0.2, 2.0), alpha=st.floats(0, 1), clip=st.floats(-5, -0.01))
@settings(max_examples=40, deadline=None)
def test_munchausen(seed: int, batch: int, choices: int, tau: float, alpha: float, clip: float) -> None:
    rng = np.random.default_rng(seed)
    q_tm1, q_t = rng.normal(0, 2, (2, batch, choices))
    mask = masks(rng, batch, choices)
    action = np.array([rng.choice(np.flatnonzero(row)) for row in mask])
    expected = [reference.munchausen(q_tm1[b], action[b], q_t[b], mask[b], tau, alpha, clip) for b in range(batch)]
    given_mask, given_action = torch.tensor(mask), torch.tensor(action)
    q_tm1[~mask] = q_t[~mask] = nan
    bonus = ops.munchausen_reward(torch.tensor(q_tm1), given_action, tau, alpha, clip, given_mask)
    close(bonus, [e[0] for e in expected])
    close(ops.munchausen_value(torch.tensor(q_t), tau, given_mask), [e[1] for e in expected])


def test_munchausen_at_the_temperature_of_the_paper_in_float32() -> None:
    q = torch.tensor([[100.0, 100.01, -400.0]])
    expected = 100.01 + 0.03 * math.log1p(math.exp(-0.01 / 0.03))
    assert ops.munchausen_value(q, 0.03).item() == pytest.approx(expected, rel=1e-6)
    bonus = [ops.munchausen_reward(q, torch.tensor([a]), 0.03, 0.9, -1.0).item() for a in range(3)]
    assert bonus[2] == pytest.approx(-0.9)  # clipped, where τ log π is −500
    assert bonus[1] == pytest.approx(0.9 * (100.01 - expected), rel=1e-3)
    assert ops.munchausen_reward(q[:, :1], torch.tensor([0]), 0.03, 0.9, -1.0).item() == 0
    policy = ops.soft_log_policy(torch.tensor([[1.0, nan]]), 0.03, torch.tensor([[1, 0]])).exp()
    assert policy.tolist() == [[1, 0]]


# Errors and priorities.


@given(st.floats(-10, 10), st.floats(0.1, 5))
def test_huber(x: float, delta: float) -> None:
    given_x = torch.tensor([x], dtype=torch.float64)
    assert ops.huber(given_x, torch.zeros_like(given_x), delta).item() == pytest.approx(
        reference.huber(x, delta), abs=1e-12
    )


def test_huber_equals_stable_baselines() -> None:
    x = torch.linspace(-3, 3, 31, requires_grad=True)
    torch.testing.assert_close(
        ops.huber(x, torch.zeros(31)), functional.smooth_l1_loss(x, torch.zeros(31), reduction="none")
    )
    (gradient,) = torch.autograd.grad(ops.huber(x, torch.zeros(31)).sum(), x)
    torch.testing.assert_close(gradient, x.detach().clamp(-1, 1))


@given(seed=st.integers(0, 10_000), time=st.integers(1, 8), batch=st.integers(1, 4), eta=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_mixed_priority(seed: int, time: int, batch: int, eta: float) -> None:
    rng = np.random.default_rng(seed)
    td = rng.normal(size=(time, batch))
    weight = np.where(rng.random((time, batch)) < 0.4, 0, rng.random((time, batch)) + 0.1)
    expected = reference.mixed_priority(td, weight, eta)
    td[weight == 0] = nan
    given_td = torch.tensor(td, requires_grad=True)
    result = ops.mixed_priority(given_td, torch.tensor(weight), eta)
    close(result, expected)
    assert not result.requires_grad
    assert np.array_equal(td, given_td.detach().numpy(), equal_nan=True)  # nothing was written into it


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hysteretic_weight(dtype: torch.dtype) -> None:
    td = torch.tensor([-2.0, -1e-9, 0.0, 3.0], dtype=dtype, requires_grad=True)
    rate = ops.hysteretic_weight(td, increase=0.9, decrease=0.1)
    assert rate.tolist() == torch.tensor([0.1, 0.1, 0.9, 0.9], dtype=dtype).tolist()
    assert rate.dtype == dtype
    assert not rate.requires_grad


# Actors and critics.


def test_min_over_critics_and_critic_losses() -> None:
    q = torch.tensor([[1.0, 3.0], [5.0, 4.0]], requires_grad=True)
    least = ops.min_over_critics(q)
    assert least.tolist() == [1, 4]
    assert torch.autograd.grad(least.sum(), q)[0].tolist() == [[1, 0], [0, 1]]
    target = torch.tensor([2.0, 4.5])
    assert ops.critic_loss(q, target).tolist() == [2.0, 0.5]
    assert ops.sac_critic_loss(q, target).tolist() == [1.0, 0.25]
    rows = [functional.mse_loss(q[:, e], target) for e in range(2)]  # the sum of the means, as others write it
    torch.testing.assert_close(ops.critic_loss(q, target).mean(), sum(rows))


def test_smoothed_action() -> None:
    action = torch.tensor([[0.0, 0.9, -0.9, 0.5]])
    normal = torch.tensor([[0.5, 5.0, -1.0, -100.0]])
    result = ops.smoothed_action(action, normal, 0.2, 0.5)
    torch.testing.assert_close(result, torch.tensor([[0.1, 1.0, -1.0, 0.0]]))
    assert action.tolist() == torch.tensor([[0.0, 0.9, -0.9, 0.5]]).tolist()
    assert normal.tolist() == [[0.5, 5.0, -1.0, -100.0]]


def test_sac_losses() -> None:
    q, log_prob = torch.tensor([[1.0, 3.0], [5.0, 4.0]]), torch.tensor([-1.0, 2.0])
    for alpha in (0.5, torch.tensor(0.5)):
        assert ops.sac_value(q, log_prob, alpha).tolist() == [1.5, 3.0]
        assert ops.sac_actor_loss(q, log_prob, alpha).tolist() == [-1.5, -3.0]
    assert ops.ddpg_actor_loss(q[:, 0]).tolist() == [-1, -5]
    log_alpha = torch.tensor(0.3, requires_grad=True)
    loss = ops.temperature_loss(log_alpha, log_prob, -1.5)
    torch.testing.assert_close(loss, torch.tensor([0.3 * 2.5, -0.3 * 0.5]))
    (gradient,) = torch.autograd.grad(loss.mean(), log_alpha)
    assert gradient.item() == pytest.approx(1.0)  # entropy −½ is above its target −1.5: descent lowers α


@given(**sizes, critics=st.integers(1, 3), alpha=st.floats(0, 2))
@settings(max_examples=40, deadline=None)
def test_sac_discrete_value_is_the_expectation(seed: int, batch: int, choices: int, critics: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    q, logits = rng.normal(size=(batch, critics, choices)), torch.tensor(rng.normal(size=(batch, choices)))
    log_p = logits.log_softmax(-1)
    expected = [reference.sac_discrete_value(q[b], log_p[b].numpy(), alpha) for b in range(batch)]
    close(ops.sac_discrete_value(torch.tensor(q), log_p, alpha), expected)
    close(
        ops.sac_discrete_actor_loss(torch.tensor(q), log_p, torch.tensor(alpha, dtype=torch.float64)),
        -np.array(expected),
    )
    close(
        ops.sac_discrete_value(torch.tensor(q[:, 0]), log_p, alpha),
        ops.sac_discrete_value(torch.tensor(q[:, :1]), log_p, alpha),
    )


def test_sac_discrete_value_ignores_masked_actions() -> None:
    logits = torch.tensor([[0.3, 7.0, -0.2]], requires_grad=True)
    log_p = mask_logits(logits, torch.tensor([[1, 0, 1]])).log_softmax(-1)
    q = torch.tensor([[[1.0, nan, 3.0], [2.0, nan, 1.0]]])
    value = ops.sac_discrete_value(q, log_p, 0.1)
    expected = ops.sac_discrete_value(q[..., [0, 2]], logits[:, [0, 2]].log_softmax(-1), 0.1)
    torch.testing.assert_close(value, expected)
    (gradient,) = torch.autograd.grad(ops.sac_discrete_actor_loss(q, log_p, 0.1).sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0
    assert gradient[0, 0] != 0


def test_sac_discrete_actor_gradient() -> None:
    q = torch.randn(4, 2, 3, dtype=torch.float64)
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.sac_discrete_actor_loss(q, x.log_softmax(-1), 0.2), [logits])


def test_no_gradient_reaches_targets_and_temperatures() -> None:
    x = {k: torch.randn(4, 2, requires_grad=True) for k in ("a", "b", "c")}
    alpha, row = torch.tensor(0.2, requires_grad=True), x["c"][:, 0]
    targets = [
        ops.max_q_value(x["a"]),
        ops.double_q_value(x["a"], x["b"]),
        ops.td_target(x["a"], x["b"], x["c"]),
        ops.n_step_targets(x["a"], x["b"], torch.ones(4, 2), x["c"], 2, 1e-3),
        ops.munchausen_reward(x["a"], torch.zeros(4, dtype=torch.int64), 0.03, 0.9, -1.0),
        ops.munchausen_value(x["a"], 0.03),
        ops.sac_value(x["a"], row, alpha),
        ops.sac_discrete_value(x["a"], x["b"].log_softmax(-1), alpha),
        ops.smoothed_action(x["a"], x["b"], 0.2, 0.5),
    ]
    assert not any(target.requires_grad for target in targets)
    losses = [
        ops.critic_loss(x["a"], x["b"][:, 0]),
        ops.sac_critic_loss(x["a"], x["b"][:, 0]),
        ops.sac_actor_loss(x["a"], x["a"][:, 0], alpha),
        ops.sac_discrete_actor_loss(x["b"], x["a"].log_softmax(-1), alpha),
        ops.temperature_loss(x["a"][:, 0], row, -1.0),
    ]
    torch.stack(losses).sum().backward()
    assert x["a"].grad is not None
    assert x["b"].grad is None
    assert x["c"].grad is None
    assert alpha.grad is None


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_soft_n_step_targets(n: int) -> None:
    """r_t + Σ γ^k (r_{t+k} + b(s_{t+k})) + γ^m V(s_{t+m}), in float64, with endings of both kinds."""
    rng = np.random.default_rng(0)
    reward, value, bonus = rng.normal(size=(3, 6, 50))
    terminated, truncated = rng.random((2, 6, 50)) < 0.15
    value[terminated] = bonus[terminated] = np.nan  # never looked at
    expected = np.zeros((6, 50))
    for t, row in np.ndindex(6, 50):
        k = 0
        while True:
            expected[t, row] += 0.9**k * reward[t + k, row]
            k += 1
            at = t + k - 1
            if k == n or at == 5 or terminated[at, row] or truncated[at, row]:
                break
            expected[t, row] += 0.9**k * bonus[at, row]
        expected[t, row] += 0.0 if terminated[at, row] else 0.9**k * value[at, row]
    inputs = reward, 0.9 * ~terminated, (~(terminated | truncated)).astype(float), value, bonus
    found = ops.soft_n_step_targets(*(torch.from_numpy(x) for x in inputs), n)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_policy_entropy() -> None:
    log_p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64).clamp(min=1e-300).log()
    np.testing.assert_allclose(ops.policy_entropy(log_p).numpy(), [np.log(4), 0], atol=1e-12)
