"""Batch renormalization against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ludus.networks import norm as norms
from ludus.networks.module_checks import depends_on_training_mode
from ludus.networks.norm import BatchRenorm


@pytest.mark.parametrize("shape", [(16, 3), (8, 3, 5)])
def test_a_batch_renorm_is_a_batch_norm_at_first(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 1
    ours, theirs = BatchRenorm(3, momentum=0.1, eps=1e-5), nn.BatchNorm1d(3)
    for module in (ours, theirs):
        module.weight.data.copy_(torch.tensor([1.0, 2.0, 0.5]))
        module.bias.data.copy_(torch.tensor([0.0, 1.0, -1.0]))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.mean, theirs.running_mean)


def test_after_its_warm_up_it_is_corrected_towards_the_running_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ioffe 2017, algorithm 1, in float64; r and d have no gradient."""
    monkeypatch.setattr(norms, "RENORM_WARMUP", 0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 4)) * [1, 2, 5, 0.1] + [0, 1, 20, 0]
    module = BatchRenorm(4, momentum=0.1, eps=1e-3).double()
    module.mean.copy_(torch.tensor([0.5, 0.0, 1.0, 0.0]))
    module.variance.copy_(torch.tensor([1.0, 1.0, 1.0, 4.0]))
    mean, variance = module.mean.numpy().copy(), module.variance.numpy().copy()
    sigma_b, sigma = np.sqrt(x.var(0) + 1e-3), np.sqrt(variance + 1e-3)
    r, d = np.clip(sigma_b / sigma, 1 / 3, 3), np.clip((x.mean(0) - mean) / sigma, -5, 5)
    given = torch.tensor(x, requires_grad=True)
    y = module(given)
    np.testing.assert_allclose(y.detach().numpy(), (x - x.mean(0)) / sigma_b * r + d, rtol=1e-9)
    np.testing.assert_allclose(module.mean.numpy(), 0.9 * mean + 0.1 * x.mean(0), rtol=1e-9)
    np.testing.assert_allclose(module.variance.numpy(), 0.9 * variance + 0.1 * x.var(0), rtol=1e-9)
    (found,) = torch.autograd.grad(y.square().sum(), given)
    plain = (given - given.mean(0)) / (given.var(0, correction=0) + 1e-3).sqrt()
    (expected,) = torch.autograd.grad((plain * torch.tensor(r) + torch.tensor(d)).square().sum(), given)
    torch.testing.assert_close(found, expected)


def test_in_evaluation_it_uses_the_running_statistics_and_leaves_them_alone() -> None:
    module = BatchRenorm(2).eval()
    module.mean.copy_(torch.tensor([1.0, -1.0]))
    module.variance.copy_(torch.tensor([4.0, 0.25]))
    x = torch.randn(5, 2)
    torch.testing.assert_close(module(x), (x - module.mean) / (module.variance + 1e-3).sqrt())
    assert module.mean.tolist() == [1, -1]
    assert depends_on_training_mode(module)
