"""Optimizers against torch.optim and the equations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ludus.ops.optimizers import adam_, clip_norm_, fused_adam_, rmsprop_, rmsprop_tf_


def gradients(steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-6, 2, 40, dtype=dtype)
    return [torch.randn(40, generator=generator, dtype=dtype) * scale for _ in range(steps)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("eps", [1e-8, 1e-5])
@pytest.mark.parametrize("adam", [adam_, fused_adam_])
def test_adam_equals_torch(dtype: torch.dtype, tolerance: float, eps: float, adam: Callable[..., None]) -> None:
    theirs = torch.nn.Parameter(torch.linspace(-1, 1, 40, dtype=dtype))
    ours = theirs.detach().clone().requires_grad_()
    mean, square = torch.zeros_like(ours), torch.zeros_like(ours)
    step, lr = torch.zeros((), dtype=dtype), torch.tensor(3e-3, dtype=dtype)
    optimizer = torch.optim.Adam([theirs], lr=3e-3, eps=eps)
    for i, gradient in enumerate(gradients(200, dtype)):
        if i == 100:  # a schedule
            lr.fill_(1e-4)
            optimizer.param_groups[0]["lr"] = 1e-4
        theirs.grad = gradient.clone()
        optimizer.step()
        with torch.no_grad():
            adam(ours, gradient, mean, square, step, lr, 0.9, 0.999, eps)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert step.item() == 200


def test_rmsprop_equals_torch() -> None:
    ours = torch.linspace(-1, 1, 40, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = torch.optim.RMSprop([theirs], lr=7e-4, alpha=0.99, eps=1e-5)
    average, lr = torch.zeros_like(ours), torch.tensor(7e-4, dtype=torch.float64)
    for gradient in gradients(50, torch.float64):
        theirs.grad = gradient.clone()
        optimizer.step()
        rmsprop_(ours, gradient, average, lr, 0.99, 1e-5)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_rmsprop_tf_is_tensorflows() -> None:
    ours = torch.linspace(-1, 1, 40, dtype=torch.float64)
    parameter, square = ours.numpy().copy(), np.ones(40)
    average, lr = torch.ones_like(ours), torch.tensor(7e-4, dtype=torch.float64)
    for gradient in gradients(50, torch.float64):
        g = gradient.numpy()
        square = 0.99 * square + 0.01 * g**2
        parameter -= 7e-4 * g / np.sqrt(square + 1e-5)
        rmsprop_tf_(ours, gradient, average, lr, 0.99, 1e-5)
        np.testing.assert_allclose(ours.numpy(), parameter, rtol=1e-12)


@pytest.mark.parametrize("max_norm", [0.5, 5.0, 100.0])
def test_clip_norm_equals_torch(max_norm: float) -> None:
    ours, theirs = torch.tensor([3.0, 4.0]), torch.nn.Parameter(torch.zeros(2))
    theirs.grad = ours.clone()
    torch.nn.utils.clip_grad_norm_([theirs], max_norm)
    assert clip_norm_(ours, max_norm).item() == 5
    torch.testing.assert_close(ours, theirs.grad)


@pytest.mark.parametrize("max_norm", [0.5, 5.0, 5.000001, 6.0])
def test_clip_norm_check_first_is_equal(max_norm: float) -> None:
    blind, looking = torch.tensor([3.0, -4.0]), torch.tensor([3.0, -4.0])
    assert clip_norm_(blind, max_norm) == clip_norm_(looking, max_norm, check_first=True) == 5
    assert torch.equal(blind, looking)
    nothing = torch.tensor([torch.nan, 1.0])
    clip_norm_(nothing, max_norm, check_first=True)
    assert nothing.isnan().all()  # as without a look: it must show


def test_clip_norm_of_zero_only_measures() -> None:
    gradient = torch.tensor([3.0, 4.0])
    assert clip_norm_(gradient, 0.0).item() == 5
    assert gradient.tolist() == [3, 4]
    assert clip_norm_(torch.zeros(2), 0.5).item() == 0
