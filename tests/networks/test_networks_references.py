"""Pieces against other implementations of the same equations: PyTorch's layers, loops, published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork
from ludus.networks.net1d.gru import GRU
from ludus.networks.net1d.gtrxl import GTrXL
from ludus.networks.net1d.layer_norm_lstm import LayerNormLSTM
from ludus.networks.net1d.lstm import LSTM
from ludus.networks.net1d.min_gru import MinGRU
from ludus.networks.net1d.mlp import MLP
from ludus.networks.net1d.residual_mlp import ResidualMLP
from ludus.networks.net2d.attention_pool import AttentionPool
from ludus.networks.net2d.conv1d import Conv1D
from ludus.networks.net2d.deep_sets import DeepSets
from ludus.networks.net2d.transformer import TransformerDec, TransformerEnc
from ludus.networks.net3d.conv_lstm import ConvLSTM
from ludus.networks.net3d.impala_cnn import ImpalaCNN
from ludus.networks.net3d.resnet import ResNet18, ResNet50
from ludus.networks.norm import make_norm
from ludus.networks.numpy_actor import is_plain_mlp

CONFIG = NetworkConfig(hidden=(8, 6), orthogonal=False)
NO_STATE, FIRST = HiddenState(), torch.zeros(1, 1, dtype=torch.bool)


def no_resets(time: int, batch: int) -> torch.Tensor:
    return torch.zeros(time, batch, dtype=torch.bool)


@pytest.mark.parametrize(("ours", "theirs"), [(LSTM, nn.LSTM), (GRU, nn.GRU)])
def test_stacked_layers_equal_those_of_torch(ours: Any, theirs: Any) -> None:
    piece, reference = ours((3,), CONFIG, size=5, layers=2), theirs(3, 5, 2)
    for i, cell in enumerate(piece.cells):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            nn.init.normal_(getattr(cell, name), std=0.5)
            getattr(reference, f"{name}_l{i}").data.copy_(getattr(cell, name).data)
    x = torch.randn(7, 2, 3)
    y, state = piece(x, piece.initial_state(2), no_resets(7, 2))
    expected, after = reference(x)
    torch.testing.assert_close(y, expected)
    last = after[0] if ours is LSTM else after
    torch.testing.assert_close(torch.stack([state["h"], state["h2"]]), last)


def test_reset_of_a_gru_is_exact() -> None:
    piece = GRU((3,), CONFIG, size=5, layers=2)
    for parameter in piece.parameters():
        nn.init.normal_(parameter, std=2)
    x, first = torch.randn(6, 1, 3), no_resets(6, 1)
    first[3] = True
    y, _ = piece(x, piece.initial_state(1), first)
    other, _ = piece(
        torch.cat([9 * torch.randn(3, 1, 3), x[3:]]), HiddenState(h=torch.randn(1, 5), h2=torch.randn(1, 5)), first
    )
    assert torch.equal(y[3:], other[3:])
    fresh, _ = piece(x[3:], piece.initial_state(1), no_resets(3, 1))
    torch.testing.assert_close(y[3:], fresh)


def test_min_gru_equals_its_equation() -> None:
    piece = MinGRU((3,), CONFIG, size=4).double()
    x, first = torch.randn(9, 2, 3, dtype=torch.float64), torch.rand(9, 2) < 0.3
    h = torch.randn(2, 4, dtype=torch.float64)
    y, state = piece(x, HiddenState(h=h), first)
    for t in range(9):
        z = torch.sigmoid(piece.gates[0](x[t]))
        h = (1 - z) * h * ~first[t].unsqueeze(1) + z * piece.candidates[0](x[t])
        torch.testing.assert_close(y[t], h)
    torch.testing.assert_close(state["h"], h)


def test_layer_norm_lstm_equals_its_equation() -> None:
    piece = LayerNormLSTM((3,), CONFIG, size=2)
    x, h, c = torch.randn(1, 1, 3), torch.randn(1, 2), torch.randn(1, 2)
    norm = nn.functional.layer_norm
    bias = torch.tensor([0.0, 0, 1, 1, 0, 0, 0, 0])
    gates = norm(x[0] @ piece.input.weight.T, (8,)) + bias + norm(h @ piece.hidden.weight.T, (8,))
    i, f, g, o = gates.chunk(4, 1)
    new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    y, state = piece(x, HiddenState(h=h, c=c), FIRST)
    torch.testing.assert_close(state["c"], new_c)
    torch.testing.assert_close(y[0], o.sigmoid() * norm(new_c, (2,)).tanh())


def test_conv_lstm_on_one_pixel_is_an_lstm() -> None:
    piece, cell = ConvLSTM((3, 1, 1), CONFIG, channels=4, kernel=1), nn.LSTMCell(3, 4)
    cell.weight_ih.data.copy_(piece.input.weight.data[:, :, 0, 0])
    cell.weight_hh.data.copy_(piece.hidden.weight.data[:, :, 0, 0])
    cell.bias_ih.data.copy_(piece.input.bias.data)
    nn.init.zeros_(cell.bias_hh)
    x, h, c = torch.randn(1, 2, 3), torch.randn(2, 4), torch.randn(2, 4)
    state = HiddenState(h=h, c=c).map(lambda s: s.view(2, 4, 1, 1))
    y, after = piece(x.view(1, 2, 3, 1, 1), state, no_resets(1, 2))
    expected = cell(x[0], (h, c))
    torch.testing.assert_close(y.view(2, 4), expected[0])
    torch.testing.assert_close(after["c"].view(2, 4), expected[1])


def copy_attention(reference: nn.MultiheadAttention, ours: Any) -> None:
    layers = (ours.query, ours.key, ours.value)
    reference.in_proj_weight.data.copy_(torch.cat([layer.weight for layer in layers]))
    reference.in_proj_bias.data.copy_(torch.cat([layer.bias for layer in layers]))
    reference.out_proj.load_state_dict(ours.output.state_dict())


def test_transformer_encoder_equals_that_of_torch() -> None:
    piece = TransformerEnc((3, 5), CONFIG, width=8, heads=2, layers=2)
    mask = torch.tensor([[True] * 5, [True, False, True, True, False]])
    x = torch.randn(2, 3, 5)
    y = piece.input(x.transpose(1, 2))
    for block in piece.blocks:
        layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, norm_first=True, batch_first=True)
        copy_attention(layer.self_attn, block.attention)
        layer.norm1.load_state_dict(block.attention_norm.state_dict())
        layer.norm2.load_state_dict(block.feed_forward_norm.state_dict())
        layer.linear1.load_state_dict(block.feed_forward.hidden.state_dict())
        layer.linear2.load_state_dict(block.feed_forward.output.state_dict())
        y = layer(y, src_key_padding_mask=~mask)
    expected = piece.norm(y).transpose(1, 2) * mask.unsqueeze(1)
    torch.testing.assert_close(piece(x, NO_STATE, FIRST, mask)[0], expected)


def test_transformer_decoder_equals_that_of_torch() -> None:
    piece = TransformerDec((3, 4), CONFIG, (5, 6), width=8, heads=2, layers=1, queries="given").double()
    (block,) = piece.blocks
    layer = nn.TransformerDecoderLayer(8, 2, 32, dropout=0.0, norm_first=True, batch_first=True).double()
    copy_attention(layer.self_attn, block.attention)
    copy_attention(layer.multihead_attn, block.cross_attention)
    layer.linear1.load_state_dict(block.feed_forward.hidden.state_dict())
    layer.linear2.load_state_dict(block.feed_forward.output.state_dict())
    x, context = torch.randn(2, 3, 4).double(), torch.randn(2, 5, 6).double()  # other features, another length
    mask, context_mask = torch.ones(2, 4).bool(), torch.ones(2, 6).bool()
    mask[0, 3], context_mask[1, [0, 2, 5]] = False, False
    memory = piece.input_norm(piece.input(context.transpose(1, 2)))
    expected = layer(
        piece.query_input(x.transpose(1, 2)),
        memory,
        tgt_key_padding_mask=~mask,
        memory_key_padding_mask=~context_mask,
    )
    y, _ = piece(x, NO_STATE, FIRST, mask, context, context_mask)
    torch.testing.assert_close(y, piece.norm(expected).transpose(1, 2) * mask.unsqueeze(1))
    assert piece.output_mask(mask) is mask
    assert TransformerDec((3, 4), CONFIG).output_mask(mask) is None


def test_gtrxl_sees_exactly_its_memory() -> None:
    piece = GTrXL((2,), CONFIG, width=8, heads=2, layers=1, memory=3)
    x = torch.randn(8, 1, 2, requires_grad=True)
    y, state = piece(x, piece.initial_state(1), no_resets(8, 1))
    (gradient,) = torch.autograd.grad(y[6].square().sum(), x)
    assert gradient.abs().sum((1, 2)).bool().tolist() == [False, False, False, True, True, True, True, False]
    assert state["length"].tolist() == [[3]]
    first = no_resets(8, 1)
    first[5] = True
    y, state = piece(x, piece.initial_state(1), first)
    (gradient,) = torch.autograd.grad(y[6].square().sum(), x)
    assert gradient.abs().sum((1, 2)).bool().tolist() == [False, False, False, False, False, True, True, False]
    assert piece(x[:7], piece.initial_state(1), first[:7])[1]["length"].tolist() == [[2]]


def test_gtrxl_tells_the_order_of_what_it_remembers() -> None:
    piece = GTrXL((2,), CONFIG, width=8, heads=2, layers=1, memory=3)
    x = torch.randn(3, 1, 2)
    y, _ = piece(x, piece.initial_state(1), no_resets(3, 1))
    z, _ = piece(x[[1, 0, 2]], piece.initial_state(1), no_resets(3, 1))
    assert not torch.allclose(y[2], z[2])


def test_deep_sets_pools_what_is_present() -> None:
    x = torch.randn(1, 3, 4)
    mask = torch.tensor([[True, False, True, False]])
    for pool in ("mean", "sum", "max"):
        piece = DeepSets((3, 4), CONFIG, pool=pool)
        entries, _ = piece.entity(x[:, :, [0, 2]], NO_STATE, FIRST)
        pooled = {"mean": entries.mean(2), "sum": entries.sum(2), "max": entries.amax(2)}[pool]
        torch.testing.assert_close(piece(x, NO_STATE, FIRST, mask)[0], piece.output(pooled).tanh())


def test_attention_pool_of_equal_entries_is_one_of_them() -> None:
    piece = AttentionPool((3, 4), CONFIG, width=8, heads=2)
    entry = torch.randn(1, 3, 1)
    expected = torch.relu(piece.output(torch.relu(piece.value(entry[:, :, 0]))))
    torch.testing.assert_close(piece(entry.expand(-1, -1, 4), NO_STATE, FIRST)[0], expected)


def test_conv1d_sees_its_neighbours() -> None:
    piece = Conv1D((2, 9), CONFIG, channels=(3,), kernel=3, activation="elu")
    x = torch.randn(1, 2, 9, requires_grad=True)
    piece(x, NO_STATE, FIRST)[0][0, :, 4].sum().backward()
    assert x.grad[0].abs().sum(0).bool().nonzero().flatten().tolist() == [3, 4, 5]


def test_residual_mlp_passes_its_input_on() -> None:
    piece = ResidualMLP((3,), CONFIG, size=4, blocks=3)
    for layer in piece.output:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    x = torch.randn(5, 3)
    torch.testing.assert_close(piece(x, NO_STATE, FIRST)[0], nn.functional.layer_norm(piece.input(x), (4,)))


@pytest.mark.parametrize(("cls", "count"), [(ResNet18, 11_176_512), (ResNet50, 23_508_032)])
def test_resnets_have_their_published_size(cls: Any, count: int) -> None:
    # torchvision's models have 11,689,512 and 25,557,032, of which their last layers have 513,000 and 2,049,000
    assert sum(p.numel() for p in cls((3, 64, 64), CONFIG, norm="batch").parameters()) == count


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_blocks_of_a_resnet_are_initially_identities(norm: Any) -> None:
    piece = ResNet18((1, 16, 16), CONFIG, norm=norm).eval()
    x = torch.rand(2, 64, 4, 4)
    torch.testing.assert_close(piece.sections[0](x), x)


def test_impala_has_fifteen_layers() -> None:
    piece = ImpalaCNN((4, 84, 84), NetworkConfig(orthogonal=False))
    assert sum(isinstance(layer, nn.Conv2d) for layer in piece.modules()) == 15
    assert piece.linear.in_features == 32 * 11 * 11


def test_norms_of_vectors() -> None:
    x = torch.randn(64, 32) * 3 + 5
    for norm, dims in (("layer", 1), ("batch", 0)):
        y = make_norm(norm, 32, rank=1)(x)  # type: ignore[arg-type]
        torch.testing.assert_close(y.mean(dims), torch.zeros(y.mean(dims).shape), atol=1e-5, rtol=0)
    groups = make_norm("group", 32, rank=1)
    assert isinstance(groups, nn.GroupNorm)
    assert (groups.num_groups, make_norm("group", 6, rank=1).num_groups) == (2, 1)  # a group of 2 would be ±1
    torch.testing.assert_close(groups(x).view(64, 2, 16).mean(2), torch.zeros(64, 2), atol=1e-5, rtol=0)


def test_plain_mlp_with_arguments_equals_one_by_settings() -> None:
    torch.manual_seed(0)
    by_settings = MLP((4,), NetworkConfig(hidden=(9,), activation="relu"))
    torch.manual_seed(0)
    by_arguments = MLP((4,), NetworkConfig(), hidden=(9,), activation="relu")
    assert by_arguments.plain
    assert list(by_arguments.state_dict()) == list(by_settings.state_dict()) == ["layers.0.weight", "layers.0.bias"]
    x = torch.randn(3, 4)
    assert torch.equal(by_settings(x, NO_STATE, FIRST)[0], by_arguments(x, NO_STATE, FIRST)[0])


@pytest.mark.parametrize("arguments", ["", "(norm='layer')", "(norm='batch')", "(dropout=0.5)"])
def test_faster_engines_take_plain_mlps_only(arguments: str) -> None:
    network = ModularNetwork(NetworkSpec({"x": (3,)}, {"value": (1,)}), NetworkConfig(net1d=f"mlp{arguments}"))
    assert is_plain_mlp(network) == (not arguments)
    assert not network.linear


def test_mlp_normalizes_before_the_activation() -> None:
    piece = MLP((4,), CONFIG, hidden=(8,), norm="layer", activation="relu", dropout=0.5).eval()
    x = torch.randn(6, 4)
    expected = torch.relu(nn.functional.layer_norm(piece.layers[0](x), (8,)))
    torch.testing.assert_close(piece(x, NO_STATE, FIRST)[0], expected)
    dropped = piece.train()(x, NO_STATE, FIRST)[0]
    assert set((dropped / expected)[expected > 0].round(decimals=4).tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout_first": True}, "dropout_first needs dropout"),
        ({"dropout_first": True, "dropout": 0.1, "norm_inputs": True, "norm": "layer"}, "does not go together"),
        ({"norm_inputs": True}, "norm_inputs needs a norm"),
    ],
)
def test_orders_of_layers_that_do_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MLP((4,), CONFIG, **arguments)


def test_noisy_layers_need_an_agent_that_redraws_their_noise() -> None:
    config = NetworkConfig(net1d="noisy_linear(size=8)")
    assert ModularNetwork(NetworkSpec({"x": (3,)}, {"q": (2,)}, noisy=True), config)
    with pytest.raises(UserError, match=r'network.net1d is "noisy_linear\(size=8\)", whose noise this agent'):
        ModularNetwork(NetworkSpec({"x": (3,)}, {"q": (2,)}), config)
