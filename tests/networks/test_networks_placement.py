"""Parts of networks on devices of their own; without a GPU, on the CPU and the meta device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from containers_setup import saved, train
from torch import Tensor, nn

import ludus
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.networks.placement import OnDevices, device_of, is_placed, move


class Named(nn.Module):
    """Returns its inputs' devices."""

    def forward(self, x: Tensor, *, named: dict[str, Tensor]) -> Any:
        return {"x": x + named["y"], "devices": (x.device.type, named["y"].device.type)}


def test_inputs_and_outputs_are_moved() -> None:
    x, named = torch.zeros(3), {"y": torch.ones(3)}
    result = OnDevices(Named(), "meta", "meta")(x, named=named)
    assert result["devices"] == ("meta", "meta")
    assert result["x"].device.type == "meta"
    assert result["x"].shape == (3,)
    back = OnDevices(Named(), "cpu")(x, named=named)
    assert torch.equal(back["x"], torch.ones(3))
    assert OnDevices(Named(), "cpu", "meta")(x, named=named)["x"].device.type == "meta"


class Unrolled(NamedTuple):
    features: torch.Tensor
    state: HiddenState


def test_moving_keeps_the_kind_of_containers() -> None:
    state = HiddenState({"h": torch.zeros(2)})
    moved = move((state, [torch.zeros(1)], None, "text"), torch.device("meta"))
    unroll = Unrolled(torch.zeros(1), state)
    assert move(unroll, torch.device("meta")).features.device.type == "meta"
    assert isinstance(moved[0], HiddenState)
    assert moved[0]["h"].device.type == "meta"
    assert moved[1][0].device.type == "meta"
    assert moved[2:] == (None, "text")


def test_a_container_does_not_move_or_cast_a_placed_module() -> None:
    placed = OnDevices(nn.Linear(2, 2, device="meta"), "meta", "meta")  # moving a meta tensor would raise
    network = nn.Sequential(placed, nn.Linear(2, 2))
    network.to("cpu").double()
    weight, last = placed.module.weight, network[1].weight
    assert isinstance(weight, Tensor)
    assert (weight.device.type, weight.dtype) == ("meta", torch.float32)
    assert last.dtype == torch.float64
    assert device_of(network).type == "cpu"  # although the first parameter is on another device
    twin = copy.deepcopy(network).to("cpu")
    assert [is_placed(p) for p in twin.parameters()] == [True, True, False, False]
    with pytest.raises(UserError, match="All parameters of Sequential are in an OnDevices"):
        device_of(nn.Sequential(placed))


class Plain(nn.Module):
    """Features of two layers."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 8)

    def forward(self, observation: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(observation))
        return y


class Split(Plain):
    """The same, with the first layer placed."""

    def __init__(self, inputs: Any) -> None:
        super().__init__(inputs)
        self.first = OnDevices(self.first, "cpu")  # type: ignore[assignment]


@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_a_split_network_trains_as_an_undivided_one(agent: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"nb_step": 120, "freeze": ("networks.*.second.bias",)}
    if agent == "dqn":
        changes |= {"agent__warmup": 40, "agent__batch_size": 16}
    plain = train(tmp_path / "plain", "CartPole-v1", agent, network__name=f"{__name__}:Plain", **changes)
    split = train(tmp_path / "split", "CartPole-v1", agent, network__name=f"{__name__}:Split", **changes)
    expected, found = (
        {k.replace(".first.module.", ".first."): x for k, x in saved(run)["agent"].items() if isinstance(x, Tensor)}
        for run in (plain.run, split.run)
    )
    assert expected.keys() == found.keys()
    assert [name for name, x in expected.items() if not torch.equal(x, found[name])] == []
    stop = lambda numbers: numbers["step"] < 60  # noqa: E731
    part = train(tmp_path / "part", "CartPole-v1", agent, stop, network__name=f"{__name__}:Split", **changes)
    again = saved(ludus.resume(part.run).run)["agent"]
    whole = saved(split.run)["agent"]
    assert [k for k, x in whole.items() if isinstance(x, Tensor) and not torch.equal(x, again[k])] == []
    assert ludus.load(split.run).act([0.0] * 4) in (0, 1)


def test_a_split_network_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="compile is on, but the network has parts in an OnDevices"):
        train(tmp_path, "CartPole-v1", network__name=f"{__name__}:Split", compile="on")
