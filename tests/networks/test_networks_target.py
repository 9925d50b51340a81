"""Target networks: separate copies without gradients, Polyak updates, state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec
from ludus.networks.build import build_network
from ludus.networks.config import NetworkConfig
from ludus.networks.noisy import NoisyLinear, resample_noise
from ludus.networks.target import TargetNetworks

FIRST = torch.zeros(3, 2, dtype=torch.bool)


def make(**spec: Any) -> Any:
    torch.manual_seed(0)
    return build_network(NetworkConfig(), NetworkSpec({"observation": (4,)}, {"q": (3,)}, **spec))


def disturb(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p))


@pytest.mark.parametrize("spec", [{}, {"members": 2}, {"streams": True, "noisy": True}])
def test_copy_is_equal_separate_and_has_no_gradients(spec: Any) -> None:
    network = make(**spec)
    target, x = TargetNetworks({"q": network}), {"observation": torch.randn(3, 2, 4)}
    copy: Any = target.networks["q"]
    assert torch.equal(copy(x, HiddenState(), FIRST)[0]["q"], network(x, HiddenState(), FIRST)[0]["q"])
    assert not any(p.requires_grad for p in target.parameters())
    assert all(p.requires_grad for p in network.parameters())
    before = {name: p.clone() for name, p in target.named_parameters()}
    disturb(network)
    assert all(torch.equal(p, before[name]) for name, p in target.named_parameters())
    assert not copy(x, HiddenState(), FIRST)[0]["q"].requires_grad
    shared = {p.data_ptr() for p in network.parameters()} & {p.data_ptr() for p in target.parameters()}
    assert not shared


def test_update_moves_by_tau() -> None:
    network = make()
    target = TargetNetworks({"q": network})
    disturb(network)
    pairs = list(zip(target.parameters(), network.parameters(), strict=True))
    expected = [0.75 * a.double() + 0.25 * b.detach().double() for a, b in pairs]
    target.update(0.25)
    for (a, _), wanted in zip(pairs, expected, strict=True):
        torch.testing.assert_close(a.double(), wanted, atol=1e-6, rtol=1e-6)
    assert not any(torch.equal(a, b) for a, b in pairs)
    target.update(1.0)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not any(a.requires_grad for a, _ in pairs)


def test_update_works_after_parameters_and_buffers_were_replaced() -> None:
    agent = nn.Module()
    agent.network = make(noisy=True)
    agent.target = TargetNetworks({"q": agent.network})
    for p in agent.network.parameters():
        p.data = torch.randn_like(p)  # as the updater's flat parameter block does
    agent.double()  # replaces every buffer
    resample_noise(agent.network, torch.Generator())
    agent.target.update(1)
    for (name, a), b in zip(
        agent.target.networks["q"].state_dict().items(), agent.network.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


def test_buffers_are_copied_for_any_tau() -> None:
    online = nn.Sequential(nn.BatchNorm1d(3), NoisyLinear(3, 2))
    target = TargetNetworks({"q": online})
    online(torch.randn(8, 3))
    resample_noise(online, torch.Generator())
    target.update(0.01)
    for a, b in zip(target.buffers(), online.buffers(), strict=True):
        assert torch.equal(a, b)


def test_targets_stay_in_evaluation_mode() -> None:
    agent = nn.ModuleDict({"online": nn.BatchNorm1d(3)})
    agent["target"] = target = TargetNetworks({"q": agent["online"]})
    agent.train()
    assert agent["online"].training
    assert not any(module.training for module in target.modules())


def test_state_dict_has_only_the_copies_and_restores_them() -> None:
    network = make()
    target = TargetNetworks({"q": network})
    assert set(target.state_dict()) == {f"networks.q.{name}" for name in network.state_dict()}
    disturb(network)
    target.update(0.5)
    again = TargetNetworks({"q": make()})
    again.load_state_dict(target.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), target.parameters(), strict=True))
