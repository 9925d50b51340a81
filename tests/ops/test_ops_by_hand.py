"""Gradients by hand are those of autograd."""

from __future__ import annotations

import pytest
import torch

from ludus.ops.by_hand import huber_q, ppo_categorical
from ludus.ops.distributions import categorical_entropy, categorical_log_prob
from ludus.ops.policy_gradient import approx_kl, clip_fraction, entropy_loss, ppo_clip_loss, shares, value_loss
from ludus.ops.q_learning import huber, taken

COEFFICIENTS = [{"value": 0.5, "entropy": 0.0}, {"policy": 2.0, "value": 0.7, "entropy": 0.3}, {}]


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("choices", [2, 5])
def test_ppo_is_that_of_autograd(coefficients: dict[str, float], choices: int) -> None:
    torch.manual_seed(0)
    n, clip = 200, torch.tensor(0.2, dtype=torch.float64)
    logits = torch.randn(n, choices, dtype=torch.float64, requires_grad=True)
    value = torch.randn(n, dtype=torch.float64, requires_grad=True)
    action, share = torch.randint(choices, (n,)), shares((torch.rand(n) > 0.2).double())
    chosen = categorical_log_prob(logits, action)
    old = {
        "log_prob": chosen.detach() + 0.3 * torch.randn(n).double(),  # many beyond the clip, on both sides
        "return": torch.randn(n).double(),
        "weighted": torch.randn(n).double() * share,
        "share": share,
    }
    log_ratio = chosen - old["log_prob"]
    losses = {
        "policy": ppo_clip_loss(log_ratio, old["weighted"], clip).sum(),
        "value": (value_loss(value, old["return"]) * share).sum(),
        "entropy": (entropy_loss(categorical_entropy(logits)) * share).sum(),
    }
    total = sum(coefficients.get(name, 1.0) * x for name, x in losses.items())
    expected = torch.autograd.grad(total, [logits, value])
    metrics = {"kl": approx_kl(log_ratio), "clip_fraction": clip_fraction(log_ratio, clip)}
    assert 0.2 < float((metrics["clip_fraction"] * share).sum()) < 0.8

    given = ppo_categorical(logits.detach(), value.detach(), action, old, clip, coefficients)
    torch.testing.assert_close(given[0], {name: x.detach() for name, x in losses.items()})
    torch.testing.assert_close(given[1], {name: (x * share).sum().detach() for name, x in metrics.items()})
    torch.testing.assert_close(given[2:], expected, rtol=1e-12, atol=1e-14)


def test_huber_q_is_what_autograd_makes_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    q = (3 * torch.randn(2, 9, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    action = torch.randint(4, (2, 9), generator=generator)
    target, share = (torch.rand(2, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    error = taken(q, action) - target
    for given, rows in ((share, share), (None, torch.full_like(share, 1 / share.numel()))):
        loss, gradient, chosen = huber_q(q.detach(), action, target, given)
        expected = (huber(error) * rows).sum()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, q, retain_graph=True)[0])
        torch.testing.assert_close(chosen.squeeze(-1), taken(q, action).detach())
    assert (error.abs() > 1).any()
    assert (error.abs() < 1).any()
