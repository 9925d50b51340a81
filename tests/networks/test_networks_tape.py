"""The backward pass by hand gives the gradients of autograd, and steps aside where it does not apply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork
from ludus.networks.tape import Tape

FIRST = torch.zeros(3, 7, dtype=torch.bool)


def make(outputs: Any = None, **config: Any) -> ModularNetwork:
    torch.manual_seed(0)
    network = ModularNetwork({"observation": (4,)}, outputs or {"policy/action": (2,)}, NetworkConfig(**config))
    for p in network.parameters():
        nn.init.normal_(p, std=0.5)
        p.grad = torch.zeros_like(p)
    return network


def run(network: ModularNetwork, x: Tensor) -> Tensors:
    outputs: Tensors = network({"observation": x}, HiddenState(), FIRST)[0]
    return outputs


def loss(outputs: Tensors) -> Tensor:
    return torch.stack([(x.sin() * x).sum() for x in outputs.values()]).sum()


def gradients(network: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    for p in network.parameters():
        if p.grad is not None:
            p.grad.zero_()
    return found


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(8, 6), (5,), ()])
@pytest.mark.parametrize("outputs", [{"policy/action": (2,)}, {"policy/a": (3,), "policy/b": (2,), "value": (1,)}])
def test_gradients_are_those_of_autograd(activation: str, hidden: tuple[int, ...], outputs: Any) -> None:
    network, x = make(outputs, hidden=hidden, activation=activation), torch.randn(3, 7, 4)
    plainly = run(network, x)
    loss(plainly).backward()  # type: ignore[no-untyped-call]
    expected = gradients(network)
    tape = Tape(network)
    assert tape.complete
    with tape:
        given = run(network, x)
    torch.testing.assert_close(given, plainly)
    assert all(y.is_leaf for y in given.values())
    assert not tape.fed
    loss(given).backward()  # type: ignore[no-untyped-call]
    assert tape.fed
    tape.backward()
    torch.testing.assert_close(gradients(network), expected)


def test_several_calls_add_up_and_an_output_without_gradient_adds_nothing() -> None:
    network = make({"policy/action": (2,), "value": (1,)})
    x, y = torch.randn(3, 7, 4), torch.randn(3, 7, 4)
    (loss(run(network, x)) + run(network, y)["value"].sum()).backward()  # type: ignore[no-untyped-call]
    expected, tape = gradients(network), Tape(network)
    with tape:
        total = loss(run(network, x)) + run(network, y)["value"].sum()
        run(network, y)
    total.backward()  # type: ignore[no-untyped-call]
    tape.backward()
    torch.testing.assert_close(gradients(network), expected)


def test_a_new_recording_forgets_the_old_one() -> None:
    network, x = make(), torch.randn(3, 7, 4)
    tape = Tape(network)
    with tape:
        loss(run(network, x)).backward()  # type: ignore[no-untyped-call]
    with tape:
        pass
    tape.backward()
    assert all(not g.any() for g in gradients(network))


def test_gradients_reach_an_observation_that_needs_them() -> None:
    network, x = make(), torch.randn(3, 7, 4, requires_grad=True)
    tape = Tape(network)
    with tape:
        loss(run(network, x)).backward()  # type: ignore[no-untyped-call]
    tape.backward()
    assert x.grad is not None
    assert all(g.any() for g in gradients(network))


def test_nothing_is_recorded_outside_or_without_gradients() -> None:
    network, x = make(), torch.randn(3, 7, 4)
    tape = Tape(network)
    assert not run(network, x)["policy/action"].is_leaf
    with tape, torch.no_grad():
        assert not run(network, x)["policy/action"].requires_grad
    assert tape.calls == []


def test_networks_that_are_not_plain_go_the_usual_way() -> None:
    for changes in ({"activation": "elu"}, {"body": "lstm"}, {"head": "mlp"}):
        network = make(**changes)
        tape = Tape(nn.ModuleList([network, make()]))
        assert not tape.complete, changes
        with tape:
            state = network.initial_state(7)
            assert not network({"observation": torch.randn(3, 7, 4)}, state, FIRST)[0]["policy/action"].is_leaf
    fixed = make()
    for p in fixed.parameters():
        p.requires_grad_(False)
        p.grad = None
    with Tape(fixed):
        assert not run(fixed, torch.randn(3, 7, 4))["policy/action"].requires_grad
