"""Dead units, ranges and the first NaN of modules, against plain computations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.networks.ensemble import BatchedLinear
from ludus.networks.inspection import FirstNonFinite, LayerRecorder, ModuleShapes, watch_modules


class Layers(nn.Module):
    """A layer and an activation function after it."""

    def __init__(self, layer: nn.Module, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.activation = layer, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x))


def record(module: nn.Module, *inputs: Tensor) -> dict[str, float]:
    recorder = LayerRecorder(["layer"])
    with watch_modules(module, recorder), recorder:
        for x in inputs:
            module(x)
    assert not any(m._forward_hooks for m in module.modules())
    return recorder.outputs["layer"].numbers()


ACTIVATIONS = {
    "function": torch.relu,
    "functional": functional.relu,
    "method": lambda x: x.relu(),
    "in place": torch.relu_,
    "module": nn.ReLU(),
    "elu": functional.elu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "module tanh": nn.Tanh(),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_share_of_dead_units_is_found_whatever_calls_the_activation(name: str) -> None:
    layer = nn.Linear(3, 8)
    nn.init.uniform_(layer.weight, -0.1, 0.1)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([-50.0] * 3 + [0.0] * 5))  # 3 of 8 are far on the flat side
    found = record(Layers(layer, ACTIVATIONS[name]), torch.randn(100, 3))
    assert found["dead"] == 3 / 8


def test_a_unit_that_is_alive_in_one_call_is_alive() -> None:
    module = Layers(nn.Linear(1, 2), torch.relu)
    with torch.no_grad():
        module.layer.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        module.layer.bias.zero_()
    positive, negative = torch.ones(4, 1), -torch.ones(4, 1)
    assert record(module, positive)["dead"] == 0.5
    assert record(module, positive, negative)["dead"] == 0


def test_units_are_channels_of_convolutions_and_of_each_member_of_an_ensemble() -> None:
    convolution = nn.Conv2d(1, 4, 1)
    with torch.no_grad():
        convolution.weight.fill_(1.0)
        convolution.bias.copy_(torch.tensor([-9.0, 0.0, 0.0, 0.0]))
    assert record(Layers(convolution, torch.relu), torch.rand(5, 1, 3, 3))["dead"] == 1 / 4
    norm = nn.Sequential(convolution, nn.BatchNorm2d(4).eval())
    recorder = LayerRecorder(["0.1"])
    module = nn.Sequential(norm, nn.ReLU())
    with watch_modules(module, recorder), recorder:
        module(torch.rand(5, 1, 3, 3))
    assert recorder.outputs["0.1"].numbers()["dead"] == 1 / 4
    ensemble = BatchedLinear([nn.Linear(3, 4), nn.Linear(3, 4)])
    with torch.no_grad():
        ensemble.weight.fill_(1.0)
        ensemble.bias.zero_()
        ensemble.bias[1, 0, 0] = -9.0  # one unit of one member
    assert record(Layers(ensemble, torch.relu), torch.rand(2, 6, 3))["dead"] == 1 / 8


def test_the_range_is_that_of_all_calls() -> None:
    layer = nn.Linear(3, 5)
    calls = [torch.randn(7, 3), 100 + torch.randn(2, 4, 3)]
    found = record(Layers(layer, torch.sin), *calls)
    y = torch.cat([layer(x).detach().double().flatten() for x in calls])
    expected = {"mean": y.mean(), "std": y.std(correction=0), "min": y.min(), "max": y.max()}
    assert found == pytest.approx({name: float(x) for name, x in expected.items()}, rel=1e-9)


def test_the_first_module_with_a_nan_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with torch.no_grad():
        module[1][0].bias[0] = float("nan")
    first, shapes = FirstNonFinite(), ModuleShapes()
    with watch_modules(module, first, shapes):
        module(torch.zeros(3, 2))
    assert first.finding.startswith("the output of 1.0 (Linear) is the first with NaN or Inf; its inputs are finite")
    assert first.finding.endswith("its parameters are not finite")
    assert shapes["1"] == "Sequential: (3, 2) -> (3, 2)"
