import pytest
import torch

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec, SubModule
from ludus.networks import SUBMODULES
from ludus.networks.build import build_network
from ludus.networks.cast import plan_join
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork

T, B = 3, 2
FIRST = torch.zeros(T, B, dtype=torch.bool)


def rows(shapes):
    return {name: torch.rand(T, B, *shape) for name, shape in shapes.items()}


class ThreeFeatures(SubModule):
    """A custom rank-2 piece that keeps the sequence dimension."""

    dim = 2

    def __init__(self, input_shape, config):
        super().__init__(input_shape)

    def output_shape(self, dim=None):
        return self.input_shape

    def forward(self, x, state, first):
        assert x.shape == (T * B, *self.input_shape)
        return x * 2, state


def test_plain_mlp_outputs_and_gains():
    network = build_network(
        NetworkConfig(), NetworkSpec({"observation": (4,)}, {"policy/action": (2,), "value": (1,), "v": ()})
    )
    outputs, state = network(rows({"observation": (4,)}), network.initial_state(B), FIRST)
    assert {name: x.shape for name, x in outputs.items()} == {
        "policy/action": (T, B, 2),
        "value": (T, B, 1),
        "v": (T, B),
    }
    assert state == {}
    assert not network.recurrent
    for name, gain in {"policy/action": 0.01, "value": 1.0, "v": 1.0}.items():
        norm = network.projections[name].weight.norm(dim=1)
        torch.testing.assert_close(norm, torch.full_like(norm, gain), atol=1e-6, rtol=1e-5)
    x = torch.rand(T, B, 4)
    y = x
    for layer in network.plain_mlp().layers:
        y = torch.tanh(layer(y))
    expected = network.projections["policy/action"](y)
    torch.testing.assert_close(network({"observation": x}, HiddenState(), FIRST)[0]["policy/action"], expected)


@pytest.mark.parametrize("body", ["identity1d", "identity2d", "identity3d", "identity4d", "mlp", "lstm"])
def test_observations_of_every_rank_join_in_a_body_of_every_rank(body):
    inputs = {"vector": (5,), "sequence": (2, 6), "image": (1, 2, 3), "volume": (1, 1, 2, 3)}
    space = {"identity1d": (), "mlp": (), "lstm": (), "identity2d": (6,), "identity3d": (2, 3)}.get(body)
    config = NetworkConfig(net2d="identity2d", net3d="identity3d", body=body)
    if space is None:  # volumes have D=1 where the sequence has S=6: 6,1,1 and 1,2,3 expand to 6,2,3
        space = (6, 2, 3)
    network = build_network(config, NetworkSpec(inputs, {"value": (1,)}))
    assert network._join.shape[1:] == space
    outputs, state = network(rows(inputs), network.initial_state(B), FIRST)
    assert outputs["value"].shape == (T, B, 1)
    assert outputs["value"].isfinite().all()
    assert set(state) == ({"body/h", "body/c"} if body == "lstm" else set())
    assert network.plain_mlp() is None


def test_expanded_sources_are_repeated_over_space():
    inputs = {"a": (1, 2, 2), "b": (1,)}
    config = NetworkConfig(net1d="identity1d", net3d="identity3d", body="identity3d", head3d="identity3d")
    network = ModularNetwork(NetworkSpec(inputs, {"map": (1, 2, 2)}), config)
    torch.nn.init.ones_(network.projections["map"].weight)
    x = rows(inputs)
    outputs, _ = network(x, HiddenState(), FIRST)
    torch.testing.assert_close(outputs["map"], x["a"] + x["b"].reshape(T, B, 1, 1, 1))


def test_every_piece_may_be_recurrent_with_separate_states():
    config = NetworkConfig(net1d="lstm", body="lstm", head1d="lstm", lstm_size=4)
    network = build_network(config, NetworkSpec({"a.b": (3,), "items": (2,)}, {"policy/x.y": (2,), "value": (1,)}))
    assert network.recurrent
    state = network.initial_state(B)
    assert set(state) == {f"{p}/{n}" for p in ("source/a·b", "source/items", "body", "head1d") for n in "hc"}
    x, first = rows({"a.b": (3,), "items": (2,)}), torch.rand(T, B) < 0.5
    together, last = network(x, state, first)
    for t in range(T):
        outputs, state = network({k: v[t : t + 1] for k, v in x.items()}, state, first[t : t + 1])
        for name, y in outputs.items():
            torch.testing.assert_close(y[0], together[name][t])
    torch.testing.assert_close(dict(state), dict(last))
    assert len({tuple(s.flatten().tolist()) for s in last.values()}) == len(last)


def test_images_go_through_the_cnn():
    config = NetworkConfig(body="identity1d")
    network = build_network(config, NetworkSpec({"image": (4, 84, 84), "speed": (2,)}, {"policy/a": (6,)}))
    outputs, _ = network(rows({"image": (4, 84, 84), "speed": (2,)}), HiddenState(), FIRST)
    assert outputs["policy/a"].shape == (T, B, 6)
    assert network.projections["policy/a"].in_features == 512 + 64


@pytest.mark.parametrize("shape", [(4, 2), (8, 8)])
def test_matrices_go_through_an_mlp(shape):
    network = build_network(NetworkConfig(), NetworkSpec({"board": shape}, {"policy/a": (3,)}))
    sizes = [layer.in_features for layer in network.pieces["source/board"].layers]
    assert sizes == [shape[0] * shape[1], 64]
    assert network.projections["policy/a"].in_features == 64
    assert network(rows({"board": shape}), HiddenState(), FIRST)[0]["policy/a"].shape == (T, B, 3)
    assert not network.linear


def test_matrix_is_concatenated_with_other_observations():
    network = build_network(NetworkConfig(), NetworkSpec({"board": (8, 8), "speed": (2,)}, {"policy/a": (3,)}))
    assert set(network.pieces) == {"body"}
    assert network.pieces["body"].layers[0].in_features == 66


def test_network_without_a_hidden_layer_is_linear():
    outputs = {"policy/a": (3,), "value": (1,)}
    assert ModularNetwork(NetworkSpec({"o": (4,)}, outputs), NetworkConfig(hidden=())).linear
    assert ModularNetwork(NetworkSpec({"o": (4, 2)}, outputs), NetworkConfig(net2d="identity2d")).linear
    assert ModularNetwork(NetworkSpec({"clip": (2, 2, 2, 2)}, outputs), NetworkConfig()).linear
    assert not ModularNetwork(NetworkSpec({"clip": (2, 2, 2, 2)}, outputs), NetworkConfig(body="mlp")).linear
    assert not ModularNetwork(NetworkSpec({"o": (4,)}, outputs), NetworkConfig(hidden=(), body="lstm")).linear


def test_custom_piece():
    config = NetworkConfig(net2d=f"{__name__}:ThreeFeatures", body="identity2d")
    network = build_network(config, NetworkSpec({"s": (3, 7)}, {"value": (1,)}))
    assert network.projections["value"].in_features == 21
    network(rows({"s": (3, 7)}), HiddenState(), FIRST)


@pytest.mark.parametrize(
    ("config", "inputs", "outputs", "message"),
    [
        ({"net1d": "nature_cnn"}, {"o": (3,)}, {"v": (1,)}, "net1d.*rank 3.*rank 1"),
        ({"net1d": "mpl"}, {"o": (3,)}, {"v": (1,)}, 'network.net1d "mpl".*Did you mean "mlp"'),
        ({"body": "torch.nn:Linear"}, {"o": (3,)}, {"v": (1,)}, "network.body.*SubModule"),
        (
            {"net2d": "identity2d", "body": "identity2d"},
            {"a": (3, 4), "b": (2, 5)},
            {"v": (1,)},
            r'"a" and "b".*\(3, 4\) and \(2, 5\).*equal features',
        ),
        ({}, {"o": (3,)}, {"map": (1, 8, 8)}, r'"map" of shape \(1, 8, 8\) needs a map.*gives \(64,\).*"o" \(3,\)'),
        ({}, {"o": (1, 2, 3, 4, 5)}, {"v": (1,)}, '"o" has shape'),
        ({"hidden": (0,)}, {"o": (3,)}, {"v": (1,)}, "network.hidden"),
        ({"name": "modula"}, {"o": (3,)}, {"v": (1,)}, 'Did you mean "modular"'),
    ],
)
def test_invalid_settings_are_refused_when_the_network_is_built(config, inputs, outputs, message):
    with pytest.raises(UserError, match=message):
        build_network(NetworkConfig(**config), NetworkSpec(inputs, outputs))


def test_join_error_names_the_source_that_set_the_size():
    with pytest.raises(UserError, match='"b" and "c"'):
        plan_join({"a": (1, 1, 1), "b": (1, 4, 1), "c": (1, 5, 1)}, 3, "the body identity3d")


def test_every_name_in_the_table_is_a_submodule():
    from ludus.core.imports import resolve

    for name in SUBMODULES:
        piece = resolve(name, SUBMODULES, "piece")
        assert issubclass(piece, SubModule)
        assert not name.startswith("identity") or f"identity{piece.dim}d" == name


def test_state_dict_round_trip_and_gradients_reach_all_parameters():
    config = NetworkConfig(body="lstm", net3d="nature_cnn")
    inputs = {"image": (1, 40, 40), "x": (3,)}
    one, two = (build_network(config, NetworkSpec(inputs, {"policy/a": (2,), "value": (1,)})) for _ in range(2))
    two.load_state_dict(one.state_dict())
    x = rows(inputs)
    a, b = (n(x, n.initial_state(B), FIRST)[0] for n in (one, two))
    assert all(torch.equal(a[k], b[k]) for k in a)
    sum(y.sum() for y in a.values()).backward()
    assert all(p.grad is not None and p.grad.any() for p in one.parameters())
