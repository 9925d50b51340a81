"""Fused operations equal ordinary ones, and are not used under tracing or transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from ludus.containers import compiled
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork
from ludus.ops import fused

FIRST = torch.zeros(3, 7, dtype=torch.bool)
TWO = {"policy/a": (3,), "value": (1,)}


def make(inputs: Any = None, outputs: Any = None, **config: Any) -> ModularNetwork:
    torch.manual_seed(0)
    network = ModularNetwork(inputs or {"observation": (4,)}, outputs or TWO, NetworkConfig(**config))
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return network


def run(network: ModularNetwork, *x: Tensor) -> Tensors:
    outputs: Tensors = network(dict(zip(network.inputs, x, strict=True)), HiddenState(), FIRST)[0]
    return outputs


def loss(outputs: Tensors) -> Tensor:
    return torch.stack([(x.sin() * x).sum() for x in outputs.values()]).sum()


def is_fused(outputs: Tensors) -> bool:
    node: Any = next(iter(outputs.values())).grad_fn
    return bool(node.name() == "_MLPBackward")


def ordinarily(network: ModularNetwork, *x: Tensor) -> Tensors:
    """The same without the fused operation: a hook makes it step aside."""
    hook = network.projections[next(iter(network.projections))].register_forward_hook(lambda *_: None)
    outputs = run(network, *x)
    hook.remove()
    assert not is_fused(outputs)
    return outputs


def assert_equal_to_rounding(found: Any, expected: Any) -> None:
    """The tanh of numpy and torch differ in the last bit, which gradients amplify."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


EDGES = torch.tensor([0.0, -0.0, 1e-30, 1e-4, -1e-4, 9.0, -9.0, 50.0, -50.0, 1e30, -torch.inf, torch.inf, torch.nan])


@pytest.mark.parametrize("function", [lambda x: fused.tanh_(x.clone()), compiled.tanh], ids=["eager", "compiled"])
def test_tanh_in_single_precision(function: Any) -> None:
    x = torch.cat([EDGES, torch.linspace(-12, 12, 4001)])
    torch.testing.assert_close(function(x).double(), x.double().tanh(), rtol=0, atol=2e-7, equal_nan=True)


def test_tanh_in_place_also_in_other_types_and_with_a_graph() -> None:
    for x in (torch.randn(5, dtype=torch.float64), torch.randn(5).bfloat16(), torch.randn(5)[::2]):
        expected = x.tanh()
        assert fused.tanh_(x).data_ptr() == x.data_ptr()
        torch.testing.assert_close(x, expected)
    leaf = torch.randn(5, requires_grad=True)
    fused.tanh_(leaf * 1).sum().backward()
    torch.testing.assert_close(leaf.grad, 1 - leaf.detach().tanh().square())


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(8, 6), (5,), ()])
@pytest.mark.parametrize("outputs", [{"q": (2,)}, {"policy/a": (3,), "v": (), "value": (1,)}])
def test_mlp_and_all_its_gradients(activation: str, hidden: tuple[int, ...], outputs: Any) -> None:
    network = make(outputs=outputs, hidden=hidden, activation=activation)
    x = torch.randn(3, 7, 4, requires_grad=True)
    given, expected = run(network, x), ordinarily(network, x)
    assert is_fused(given) == (activation == "tanh")
    assert_equal_to_rounding(given, expected)
    wanted = [x, *network.parameters()]
    assert_equal_to_rounding(torch.autograd.grad(loss(given), wanted), torch.autograd.grad(loss(expected), wanted))


def test_several_observations_are_joined() -> None:
    network = make({"a": (4,), "b": (2,)})
    x = torch.randn(3, 7, 4), torch.randn(3, 7, 2, requires_grad=True)
    given, expected = run(network, *x), ordinarily(network, *x)
    assert is_fused(given)
    assert_equal_to_rounding(given, expected)
    assert_equal_to_rounding(torch.autograd.grad(loss(given), x[1]), torch.autograd.grad(loss(expected), x[1]))


def test_an_output_without_a_gradient_and_frozen_parameters() -> None:
    network, x = make(), torch.randn(3, 7, 4, requires_grad=True)
    value = network.projections["value"]
    assert torch.autograd.grad(run(network, x)["policy/a"].sum(), value.weight, allow_unused=True) == (None,)  # type: ignore[arg-type]
    expected = torch.autograd.grad(loss(run(network, x)), x)
    network.requires_grad_(False)
    assert_equal_to_rounding(torch.autograd.grad(loss(run(network, x)), x), expected)
    assert not run(network, x.detach())["value"].requires_grad
    with torch.no_grad():
        assert_equal_to_rounding(run(network, x), run(network, x.detach()))


@pytest.mark.parametrize("linear", [True, False])
def test_second_derivatives(linear: bool) -> None:
    network, x = make().double(), torch.randn(3, 7, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for outputs in (run(network, x), ordinarily(network, x)):
        total = outputs["value"].sum() if linear else loss(outputs)
        wanted = [x, *network.parameters()]
        slopes = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
        again = torch.stack([y.square().sum() for y in slopes if y is not None]).sum()
        found.append(torch.autograd.grad(again, wanted, allow_unused=True))
    assert_equal_to_rounding(*found)


def test_second_derivatives_of_categorical_terms() -> None:
    logits, action = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randint(4, (5,))
    assert torch.autograd.gradgradcheck(lambda x: fused.categorical_terms(x, action), logits)


def test_parameters_changed_before_backward_raise() -> None:
    network = make()
    total = loss(run(network, torch.randn(3, 7, 4)))
    with torch.no_grad():
        for p in network.parameters():
            p.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()  # type: ignore[no-untyped-call]


class Sub(ModularNetwork):
    """A network of one's own."""


def test_hooks_replaced_layers_and_subclasses_are_called() -> None:
    x, seen = torch.randn(3, 7, 4), []
    network = make()
    for module in (network.plain_mlp().layers[0], network.plain_mlp(), network.projections["value"]):  # type: ignore[union-attr]
        for register in (module.register_forward_hook, module.register_full_backward_hook):  # type: ignore[union-attr]
            hook = register(lambda *_: seen.append(1))
            loss(run(network, x)).backward()  # type: ignore[no-untyped-call]
            hook.remove()
    assert len(seen) == 6
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    run(network, x)
    hook.remove()
    assert len(seen) > 6
    assert is_fused(run(network, x))

    class Twice(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    expected = run(network, x)["value"]
    last: Any = network.projections["value"]
    last.__class__ = Twice
    assert_equal_to_rounding(run(network, x)["value"], 2 * expected)
    assert not is_fused(run(Sub({"observation": (4,)}, TWO, NetworkConfig()), x))
    for streams, noisy in ((True, False), (False, True)):
        other = ModularNetwork({"observation": (4,)}, TWO, NetworkConfig(), streams=streams, noisy=noisy)
        assert not is_fused(run(other, x))


def test_transforms_and_tracing_use_ordinary_operations() -> None:
    network, x = make(), torch.randn(3, 7, 4)
    parameters = dict(network.named_parameters())

    def total(given: Tensors) -> Tensor:
        return loss(functional_call(network, given, ({"observation": x}, HiddenState(), FIRST))[0])

    expected = torch.autograd.grad(total(parameters), list(parameters.values()))
    assert_equal_to_rounding(tuple(torch.func.grad(total)(parameters).values()), expected)
    graph = make_fx(lambda x: run(network, x))(x)
    assert_equal_to_rounding(graph(x), run(network, x))
    with torch.autograd.set_detect_anomaly(True):
        assert not is_fused(run(network, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert run(network, x)["value"].dtype == torch.bfloat16
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(network, forward_ad.make_dual(x, torch.ones_like(x)))["value"]).tangent
        assert tangent is not None


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_categorical_terms_and_their_gradient(weights: tuple[float, float]) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 6, 4, dtype=torch.float64, requires_grad=True)
    action, scale = torch.randint(4, (5, 6)), torch.randn(2, 5, 6, dtype=torch.float64)

    def total(terms: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack([(w * s * x).sum() for w, s, x in zip(weights, scale, terms, strict=True) if w]).sum()

    given = fused.categorical_terms(logits, action)
    with torch.autograd.set_detect_anomaly(True):
        expected = fused.categorical_terms(logits, action)
    assert type(given[0].grad_fn) is not type(expected[0].grad_fn)
    assert_equal_to_rounding(given, expected)
    assert_equal_to_rounding(torch.autograd.grad(total(given), logits), torch.autograd.grad(total(expected), logits))
    distribution = torch.distributions.Categorical(logits=logits)
    assert_equal_to_rounding(given, (distribution.log_prob(action), distribution.entropy()))


def test_gradients_are_those_of_autograd() -> None:
    x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
    found = fused.gradients((x * y.sin()).sum(), (x, y, z))
    assert_equal_to_rounding(found[:2], torch.autograd.grad((x * y.sin()).sum(), (x, y)))
    assert found[2] is None
    with pytest.raises(UserError, match="does not depend on any trainable parameter"):
        fused.gradients(torch.ones(()), (x,))
