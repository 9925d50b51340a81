"""Building networks from a NetworkSpec: concatenated inputs, streams, noisy layers, ensembles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec, Shapes
from ludus.networks.build import build_network
from ludus.networks.config import NetworkConfig
from ludus.networks.critic import ACTION, concatenate_inputs
from ludus.networks.ensemble import BatchedMLPEnsemble, Ensemble
from ludus.networks.noisy import NoisyLinear
from ludus.networks.projection import Stream

T, B = 3, 2
FIRST = torch.zeros(T, B, dtype=torch.bool)
CRITIC: Shapes = {"observation": (4,), "action": (2,)}
Q: Shapes = {"q": (1,)}


def rows(shapes: Shapes) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(T, B, *shape) for name, shape in shapes.items()}


class Own(nn.Module):
    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return torch.cat([observation, action], 1)


def mixed(spec: NetworkSpec, **config: Any) -> Tensor:
    """Return the largest d²Q / ds da."""
    torch.manual_seed(0)
    network, x = build_network(NetworkConfig(**config), spec).double(), rows(spec.inputs)
    x = {name: y.double().requires_grad_() for name, y in x.items()}
    q = network(x, network.initial_state(B).map(Tensor.double), FIRST)[0]["q"]
    (by_action,) = torch.autograd.grad(q.sum(), x["action"], create_graph=True)
    found = []
    for name in spec.inputs:
        if name != "action" and by_action.requires_grad:
            (second,) = torch.autograd.grad(by_action.sum(), x[name], retain_graph=True, allow_unused=True)
            found.append(torch.zeros(()) if second is None else second.abs().max())
    return torch.stack(found).min() if found else torch.zeros(())


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("config", [{}, {"body": "mlp"}, {"net1d": "identity1d"}, {"head1d": "mlp"}])
def test_critic_mixes_observation_and_action(members: int, config: Any) -> None:
    spec = NetworkSpec(CRITIC, Q, concatenate=True, members=members)
    assert mixed(spec, **config) > 1e-3
    assert mixed(NetworkSpec(CRITIC, Q), body="identity1d") == 0  # joined only by the last, linear layer


def test_several_observations_are_mixed_by_default() -> None:
    assert mixed(NetworkSpec(CRITIC, Q)) > 1e-3


def test_images_are_encoded_before_the_action_is_concatenated() -> None:
    inputs = {"image": (1, 36, 36), "speed": (3,), "action": (2,)}
    assert mixed(NetworkSpec(inputs, Q, concatenate=True)) > 1e-6
    network: Any = build_network(NetworkConfig(hidden=(7,)), NetworkSpec(inputs, Q, concatenate=True))
    assert set(network.pieces) == {"source/image", "body"}
    assert network.pieces["body"].input_shape == (512 + 3 + 2,)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("identity1d", "mlp", "identity1d")),
        ({"net1d": "identity1d"}, ("identity1d", "mlp", "identity1d")),
        ({"body": "lstm"}, ("identity1d", "lstm", "mlp")),
        ({"net1d": "lstm"}, ("identity1d", "lstm", "mlp")),
        ({"body": "mlp"}, ("identity1d", "mlp", "mlp")),
        ({"body": "identity3d"}, ("identity1d", "identity3d", "mlp")),
        ({"body": "lstm", "head1d": "lstm"}, ("identity1d", "lstm", "lstm")),
    ],
)
def test_pieces_after_concatenate_inputs(given: Any, expected: tuple[str, str, str]) -> None:
    made = concatenate_inputs(NetworkConfig(**given, hidden=(5,)))
    assert (made.net1d, made.body, made.head1d) == expected
    assert made.hidden == (5,)


def test_hidden_state_of_a_recurrent_critic_does_not_depend_on_actions() -> None:
    inputs = {"observation": (4,), ACTION: (2,)}
    network: Any = build_network(NetworkConfig(body="lstm", hidden=(9,)), NetworkSpec(inputs, Q, concatenate=True))
    given = rows(inputs)
    given[ACTION].requires_grad_()
    outputs, state = network(given, network.initial_state(B), FIRST)
    assert outputs["q"].shape == (T, B, 1)
    assert network.recurrent
    assert set(state) == {"body/h", "body/c"}
    assert not any(x.grad_fn is not None and _reaches(x, given[ACTION]) for x in state.values())
    (slope,) = torch.autograd.grad(outputs["q"][-1].sum(), given[ACTION])
    assert slope[-1].abs().min() > 0
    assert not slope[:-1].any()  # earlier actions have no effect


def _reaches(x: torch.Tensor, leaf: torch.Tensor) -> bool:
    return torch.autograd.grad(x.sum(), leaf, allow_unused=True, retain_graph=True)[0] is not None


@pytest.mark.parametrize("noisy", [False, True])
def test_streams_have_a_hidden_layer_per_output(noisy: bool) -> None:
    outputs: Shapes = {"value": (1,), "advantage": (3,)}
    spec = NetworkSpec({"observation": (4,)}, outputs, streams=True, noisy=noisy)
    network: Any = build_network(NetworkConfig(hidden=(8,), activation="relu"), spec)
    kind = NoisyLinear if noisy else nn.Linear
    x = torch.randn(T, B, 4)
    given = network({"observation": x}, HiddenState(), FIRST)[0]
    features = torch.relu(network.pieces["source/observation"].layers[0](x))
    for name, (size,) in outputs.items():
        stream = network.projections[name]
        assert isinstance(stream, Stream)
        assert (type(stream.hidden), type(stream.last)) == (kind, kind)
        assert (stream.hidden.in_features, stream.hidden.out_features) == (8, 8)
        assert given[name].shape == (T, B, size)
        torch.testing.assert_close(given[name], stream.last(torch.relu(stream.hidden(features))))
    given["value"].sum().backward()
    assert all(p.grad is None for p in network.projections["advantage"].parameters())
    assert all(p.grad is not None for p in network.projections["value"].parameters())
    assert isinstance(network.pieces["source/observation"].layers[0], nn.Linear)  # the trunk is never noisy


def test_without_streams_only_the_last_layer_is_noisy() -> None:
    network: Any = build_network(NetworkConfig(), NetworkSpec({"observation": (4,)}, {"q": (3,)}, noisy=True))
    assert isinstance(network.projections["q"], NoisyLinear)
    assert sum(isinstance(layer, NoisyLinear) for layer in network.modules()) == 1


def test_ensemble_members_differ_and_are_batched_if_plain_mlps() -> None:
    plain = build_network(NetworkConfig(), NetworkSpec(CRITIC, Q, concatenate=True, members=2))
    assert isinstance(plain, BatchedMLPEnsemble)
    weights = plain.layers[0].weight
    assert isinstance(weights, Tensor)
    assert not torch.equal(weights[0], weights[1])
    config = NetworkConfig(name=f"{__name__}:Own")
    assert isinstance(build_network(config, NetworkSpec(CRITIC, Q, concatenate=True, members=2)), Ensemble)


def test_noisy_custom_networks_and_streams_on_maps_are_refused() -> None:
    with pytest.raises(UserError, match=r'noisy layers.*Own.*network.name to "modular"'):
        build_network(NetworkConfig(name=f"{__name__}:Own"), NetworkSpec(CRITIC, Q, noisy=True))
    config = NetworkConfig(net3d="identity3d", body="identity3d")
    with pytest.raises(UserError, match=r'"map" has shape \(1, 2, 2\)'):
        build_network(config, NetworkSpec({"image": (1, 2, 2)}, {"map": (1, 2, 2)}, streams=True))
