"""The tanh of numpy equals torch's to rounding, also in gradients, and is not used under tracing or transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from ludus.containers import compiled
from ludus.ops.activations import tanh

EDGES = torch.tensor([0.0, -0.0, 1e-30, 1e-4, -1e-4, 9.0, -9.0, 50.0, -50.0, 1e30, -torch.inf, torch.inf, torch.nan])


def is_numpy(y: Tensor) -> bool:
    node: Any = y.grad_fn
    return bool(node.name() == "_TanhBackward")


@pytest.mark.parametrize("function", [tanh, compiled.tanh], ids=["eager", "compiled"])
def test_tanh_in_single_precision(function: Any) -> None:
    x = torch.cat([EDGES, torch.linspace(-12, 12, 4001)])
    torch.testing.assert_close(function(x).double(), x.double().tanh(), rtol=0, atol=2e-7, equal_nan=True)


def test_gradients_and_second_derivatives() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    found, expected = tanh(x.t()), torch.tanh(x.t())  # not contiguous
    assert is_numpy(found)
    torch.testing.assert_close(found, expected)
    for y in (found, expected):
        y.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, 2 * (1 - x.detach().tanh().square()))
    slopes = [torch.autograd.grad(y.square().sum(), x, create_graph=True)[0] for y in (found, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(slope.sum(), x) for slope in slopes))


def test_the_input_is_not_changed() -> None:
    x = torch.randn(4)
    before = x.clone()
    tanh(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_use_torch(dtype: torch.dtype) -> None:
    x = torch.randn(5).to(dtype).requires_grad_()
    assert not is_numpy(tanh(x))
    torch.testing.assert_close(tanh(x), torch.tanh(x))


def test_tracing_and_transforms_use_torch() -> None:
    x = torch.randn(5)
    torch.testing.assert_close(torch.func.grad(lambda x: tanh(x).sum())(x), 1 - x.tanh().square())
    torch.testing.assert_close(torch.func.vmap(tanh)(x), x.tanh())
    assert "aten.tanh" in make_fx(tanh)(x).code
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(tanh(forward_ad.make_dual(x, torch.ones_like(x)))).tangent is not None
    with torch.inference_mode():
        torch.testing.assert_close(tanh(x), x.tanh())
