import pytest
import torch

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import NetworkSpec
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork
from ludus.networks.net1d.mlp import MLP
from ludus.networks.net3d.nature_cnn import NatureCNN
from ludus.networks.net3d.small_cnn import SmallCNN

FIRST = torch.zeros(1, 1, dtype=torch.bool)


def test_mlp_sizes_and_orthogonal_initialization():
    mlp = MLP((5,), NetworkConfig(hidden=(32, 16)))
    weight = mlp.layers[1].weight  # [16, 32]: rows orthogonal, of norm √2
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(16), atol=1e-5, rtol=0)
    assert not mlp.layers[0].bias.any()
    assert mlp.output_shape() == (16,)
    assert mlp.output_shape(3) == (16, 1, 1)
    assert mlp(torch.zeros(3, 5), HiddenState(), FIRST)[0].shape == (3, 16)


def test_orthogonal_can_be_turned_off():
    weight = MLP((64,), NetworkConfig(orthogonal=False)).layers[0].weight
    assert (weight @ weight.T - 2 * torch.eye(64)).abs().max() > 0.1


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "gelu", "silu"])
def test_every_activation(activation):
    mlp = MLP((4,), NetworkConfig(hidden=(8,), activation=activation))
    y, _ = mlp(torch.randn(10, 4), HiddenState(), FIRST)
    reference = {"elu": torch.nn.functional.elu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
    function = reference.get(activation) or getattr(torch, activation)
    torch.manual_seed(0)
    x = torch.randn(10, 4)
    torch.testing.assert_close(mlp(x, HiddenState(), FIRST)[0], function(mlp.layers[0](x)))
    assert y.isfinite().all()


def test_nature_cnn_matches_plain_convolutions():
    cnn = NatureCNN((4, 84, 84), NetworkConfig())
    x = torch.rand(3, 4, 84, 84)
    y, _ = cnn(x, HiddenState(), FIRST)
    z = x
    for convolution in cnn.convolutions:
        weight = convolution.weight.detach().contiguous()
        z = torch.relu(torch.nn.functional.conv2d(z, weight, convolution.bias, convolution.stride))
    assert z.shape == (3, 64, 7, 7)
    z = torch.relu(cnn.linear(z.permute(0, 2, 3, 1).reshape(3, -1)))
    torch.testing.assert_close(y, z, atol=1e-5, rtol=1e-4)
    assert cnn.output_shape() == (512,)
    assert cnn.convolutions[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_nature_cnn_refuses_small_images():
    assert NatureCNN((1, 36, 40), NetworkConfig())(torch.zeros(1, 1, 36, 40), HiddenState(), FIRST)[0].shape == (1, 512)
    with pytest.raises(UserError, match="36×36, but one is 35×40"):
        NatureCNN((1, 35, 40), NetworkConfig())


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 35), (35, 1), (2, 3), (3, 3), (5, 4), (8, 8), (12, 12), (17, 9), (35, 35), (35, 400)]
)
def test_small_images_get_small_cnn_which_uses_every_pixel(size):
    shape = (3, *size)
    network = ModularNetwork(NetworkSpec({"image": shape}, {"value": (1,)}), NetworkConfig())
    cnn = network.pieces["source/image"]
    assert isinstance(cnn, SmallCNN)
    x = torch.rand(2, 1, *shape, requires_grad=True)
    outputs, _ = network({"image": x}, HiddenState(), torch.zeros(2, 1, dtype=torch.bool))
    assert outputs["value"].shape == (2, 1, 1)
    linear = x.flatten(0, 1)
    for convolution in cnn.convolutions:  # without activations, so that none hides a pixel
        linear = convolution(linear)
    assert linear.flatten(1).shape[1] == cnn.linear.in_features
    linear.square().sum().backward()
    assert (x.grad.abs().sum((0, 1, 2)) > 0).all()


@pytest.mark.parametrize("side", range(1, 40))
def test_every_image_size_has_a_cnn(side):
    network = ModularNetwork(NetworkSpec({"image": (1, side, side)}, {"value": (1,)}), NetworkConfig())
    assert isinstance(network.pieces["source/image"], SmallCNN if side < 36 else NatureCNN)
    outputs, _ = network({"image": torch.zeros(1, 1, 1, side, side)}, HiddenState(), FIRST)
    assert outputs["value"].shape == (1, 1, 1)


@pytest.mark.parametrize("settings", [{"hidden": (64, 0)}, {"hidden": (-3,)}, {"lstm_size": 0}])
def test_sizes_below_one_are_refused(settings):
    with pytest.raises(UserError, match=rf"network\.{next(iter(settings))}"):
        NetworkConfig(**settings).validate()
