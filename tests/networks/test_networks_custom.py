import pytest
import torch
from torch import nn

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.networks.build import build_network
from ludus.networks.config import NetworkConfig
from ludus.networks.custom import make_custom

T, B = 3, 2
FIRST = torch.zeros(T, B, dtype=torch.bool)
INPUTS = {"camera/left": (3, 8, 8), "speed": (2,)}
OUTPUTS = {"policy/action": (4,), "value": (1,)}


def build(cls, inputs=INPUTS, outputs=OUTPUTS):
    return build_network(NetworkConfig(name=f"{__name__}:{cls.__name__}"), NetworkSpec(inputs, outputs))


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, camera_left, speed):
        assert camera_left.shape[1:] == (3, 8, 8)
        return torch.cat([self.norm(camera_left).flatten(1), speed], 1)


class Whole(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.linear = nn.Linear(inputs["speed"][0], 5)

    def forward(self, speed):
        y = self.linear(speed)
        return {"policy/action": y[:, :4], "value": y[:, 4:]}


class AnyName(nn.Module):
    def forward(self, x):
        return x * 2


class Typo(nn.Module):
    def forward(self, camera_left, sped):
        return sped


class Three(nn.Module):
    def forward(self, **observation):
        return observation["camera_left"]


class Broken(nn.Module):
    def forward(self, speed):
        return speed @ torch.zeros(7, 7)


class Half(nn.Module):
    def forward(self, speed):
        return {"policy/action": torch.cat([speed, speed], 1)}


class WrongShape(nn.Module):
    def forward(self, speed):
        return {"policy/action": speed, "value": speed}


class Greedy(nn.Module):
    def __init__(self, inputs, outputs, more):
        super().__init__()


class Own(Network):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, observation, state, first):
        return {name: torch.zeros(*first.shape, *shape) for name, shape in self.outputs.items()}, state


class OwnWrong(Own):
    def forward(self, observation, state, first):
        return {"value": torch.zeros(*first.shape, 1)}, state


def not_a_class():
    return None


def test_features_get_a_projection_per_output_and_batch_statistics_do_not_change():
    network = build(Features)
    assert int(network.module.norm.num_batches_tracked) == 0
    assert network.module.training
    x = {name: torch.rand(T, B, *shape) for name, shape in INPUTS.items()}
    outputs, state = network(x, HiddenState(), FIRST)
    assert {name: y.shape[2:] for name, y in outputs.items()} == OUTPUTS
    assert state == {}
    assert network.projections["policy/action"].weight.norm(dim=1).max() < 0.011


def test_dict_outputs_are_used_unchanged():
    network = build(Whole)
    x = {name: torch.rand(T, B, *shape) for name, shape in INPUTS.items()}
    outputs, _ = network(x, HiddenState(), FIRST)
    torch.testing.assert_close(outputs["value"], network.module.linear(x["speed"])[..., 4:])
    assert not network.projections


def test_single_argument_may_have_any_name():
    network = build(AnyName, {"0": (5,)}, {"q": (2,), "v": ()})
    outputs, _ = network({"0": torch.rand(T, B, 5)}, HiddenState(), FIRST)
    assert outputs["q"].shape == (T, B, 2)
    assert outputs["v"].shape == (T, B)


def test_custom_network():
    assert isinstance(build(Own), Own)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Typo, 'argument "sped".*Did you mean "speed"'),
        (Three, r"tensor of shape \(2, 3, 8, 8\)"),
        (Broken, "Broken fails on a batch of zeros.*speed"),
        (Half, 'not the output "value"'),
        (WrongShape, r'"policy/action" of shape \(2, 2\).*must be a tensor of shape \(2, 4\)'),
        (Greedy, "needs 3 arguments"),
        (OwnWrong, 'OwnWrong returns value, but not the output "policy/action"'),
        (not_a_class, "not a class"),
    ],
)
def test_invalid_networks_are_refused(cls, message):
    with pytest.raises(UserError, match=message):
        build(cls)


class Blind(nn.Module):
    def __init__(self, inputs: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation)


def test_critic_without_the_action_is_refused() -> None:
    outputs = {"value": (1,)}
    make_custom(Blind, "mine:Blind", NetworkSpec({"observation": (3,)}, outputs))
    with pytest.raises(UserError, match=r"^Network Blind does not read taken_action, .* an argument taken_action=None"):
        make_custom(Blind, "mine:Blind", NetworkSpec({"observation": (3,), "taken_action": (2,)}, outputs))
