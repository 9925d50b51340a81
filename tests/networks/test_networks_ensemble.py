"""Ensembles compute the same as their members, batched or not."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec, Shapes
from ludus.core.types import Tensors
from ludus.networks.build import build_network
from ludus.networks.config import NetworkConfig
from ludus.networks.ensemble import BatchedMLPEnsemble, Ensemble, make_ensemble

T, B = 3, 5
FIRST = torch.zeros(T, B, dtype=torch.bool)
CRITIC: Shapes = {"observation": (4,), "action": (2,)}
OUTPUTS: Shapes = {"q": (3,), "v": ()}


def members(n: int, spec: NetworkSpec, **config: Any) -> list[Network]:
    torch.manual_seed(0)
    return [build_network(NetworkConfig(**config), spec) for _ in range(n)]


def rows(shapes: Shapes) -> Tensors:
    torch.manual_seed(1)
    return {name: torch.randn(T, B, *shape, requires_grad=True) for name, shape in shapes.items()}


def stacked(networks: list[Network], x: Tensors, state: HiddenState) -> Tensors:
    found = [network(x, state, FIRST)[0] for network in networks]
    return {name: torch.stack([outputs[name] for outputs in found], 2) for name in found[0]}


def loss(outputs: Tensors) -> Tensor:
    return torch.stack([(x.sin() * x).sum() for x in outputs.values()]).sum()


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
@pytest.mark.parametrize("hidden", [(8, 6), (5,)])
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize(
    "spec", [NetworkSpec(CRITIC, OUTPUTS, concatenate=True), NetworkSpec({"observation": (4,)}, OUTPUTS)]
)
def test_batched_mlps_match_their_members(spec: NetworkSpec, n: int, hidden: tuple[int, ...], activation: str) -> None:
    networks = members(n, spec, hidden=hidden, activation=activation)
    batched, x = make_ensemble(networks, spec.inputs), rows(spec.inputs)
    assert isinstance(batched, BatchedMLPEnsemble)
    outputs, state = batched(x, batched.initial_state(B), FIRST)
    assert {name: y.shape for name, y in outputs.items()} == {"q": (T, B, n, 3), "v": (T, B, n)}
    assert state == {}
    expected = stacked(networks, x, HiddenState())
    torch.testing.assert_close(outputs, expected)
    given = torch.autograd.grad(loss(outputs), [*x.values(), *batched.parameters()])
    wanted = torch.autograd.grad(loss(expected), [*x.values(), *(p for m in networks for p in m.parameters())])
    torch.testing.assert_close(given[: len(x)], wanted[: len(x)])
    total = sum(g.square().sum() for g in given[len(x) :])  # the same numbers in other shapes
    torch.testing.assert_close(total, sum(g.square().sum() for g in wanted[len(x) :]))


def test_members_are_independent() -> None:
    batched = build_network(NetworkConfig(), NetworkSpec(CRITIC, {"q": (1,)}, concatenate=True, members=3))
    q = batched(rows(CRITIC), HiddenState(), FIRST)[0]["q"]
    q[:, :, 1].sum().backward()
    for p in batched.parameters():
        assert p.grad is not None
        assert not p.grad[[0, 2]].any()
        assert p.grad[1].any()


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (NetworkSpec(CRITIC, OUTPUTS), {"body": "identity1d"}),  # a source each
        (NetworkSpec(CRITIC, OUTPUTS, concatenate=True), {"body": "lstm"}),
        (NetworkSpec(CRITIC, OUTPUTS, concatenate=True), {"head1d": "mlp"}),
        (NetworkSpec(CRITIC, OUTPUTS, concatenate=True, streams=True), {}),
        (NetworkSpec(CRITIC, OUTPUTS, concatenate=True, noisy=True), {}),
        (NetworkSpec({"image": (1, 2, 2), "action": (2,)}, OUTPUTS, concatenate=True), {"net3d": "identity3d"}),
        (NetworkSpec({"observation": (4,)}, OUTPUTS), {"net1d": "identity1d"}),
    ],
)
def test_other_members_run_one_after_the_other(spec: NetworkSpec, config: Any) -> None:
    networks, x = members(2, spec, **config), rows(spec.inputs)
    ensemble = make_ensemble(deepcopy(networks), spec.inputs)
    assert isinstance(ensemble, Ensemble)
    state = networks[0].initial_state(B)
    outputs, _ = ensemble(x, ensemble.initial_state(B), FIRST)
    torch.testing.assert_close(outputs, stacked(networks, x, state))


def test_members_have_separate_hidden_states() -> None:
    spec = NetworkSpec(CRITIC, {"q": (1,)}, concatenate=True)
    networks, x = members(2, spec, body="lstm", lstm_size=4), rows(CRITIC)
    ensemble = make_ensemble(networks, spec.inputs)
    assert ensemble.recurrent
    assert set(ensemble.initial_state(B)) == {f"{i}/body/{n}" for i in range(2) for n in "hc"}
    first = torch.rand(T, B) < 0.4
    together, last = ensemble(x, ensemble.initial_state(B), first)
    state = ensemble.initial_state(B)
    for t in range(T):
        outputs, state = ensemble({k: v[t : t + 1] for k, v in x.items()}, state, first[t : t + 1])
        torch.testing.assert_close(outputs["q"][0], together["q"][t])
    torch.testing.assert_close(dict(state), dict(last))
    assert not torch.equal(last["0/body/h"], last["1/body/h"])


def test_ensemble_can_be_traced_as_a_function_of_its_parameters() -> None:
    batched = build_network(NetworkConfig(hidden=(8,)), NetworkSpec(CRITIC, {"q": (1,)}, concatenate=True, members=2))
    x = {name: y.detach() for name, y in rows(CRITIC).items()}

    def q(parameters: Tensors) -> Tensor:
        found: Tensor = torch.func.functional_call(batched, parameters, (x, HiddenState(), FIRST))[0]["q"]
        return found.square().sum()

    parameters = {name: p.detach().clone() for name, p in batched.named_parameters()}
    traced = make_fx(torch.func.grad(q))(parameters)
    other = {name: 2 * p for name, p in parameters.items()}
    torch.testing.assert_close(traced(other), torch.func.grad(q)(other))


@pytest.mark.parametrize("body", ["identity1d", "lstm"])
def test_only_the_first_members_can_be_run(body: str) -> None:
    spec = NetworkSpec(CRITIC, OUTPUTS, concatenate=True)
    network, x = make_ensemble(members(3, spec, hidden=(8,), body=body), spec.inputs), rows(spec.inputs)
    state = network.initial_state(B)
    whole, some = network(x, state, FIRST)[0], network(x, state, FIRST, members=2)[0]
    torch.testing.assert_close(some, {name: y[:, :, :2] for name, y in whole.items()})


@pytest.mark.parametrize("body", ["identity1d", "lstm"])
def test_members_may_have_inputs_of_their_own(body: str) -> None:
    spec = NetworkSpec(CRITIC, OUTPUTS, concatenate=True)
    networks, x = members(3, spec, hidden=(8,), body=body), rows(spec.inputs)
    ensemble = make_ensemble(deepcopy(networks), spec.inputs)
    own = x | {"action": torch.randn(T, B, 3, 2)}
    outputs, _ = ensemble(own, ensemble.initial_state(B), FIRST)
    each = [own | {"action": own["action"][:, :, i]} for i in range(3)]
    for i, (network, given) in enumerate(zip(networks, each, strict=True)):
        expected, _ = network(given, network.initial_state(B), FIRST)
        torch.testing.assert_close({name: y[:, :, i] for name, y in outputs.items()}, expected)
