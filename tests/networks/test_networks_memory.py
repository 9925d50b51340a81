"""Memory use: the width of streams, and the message when memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ludus.cli import train
from ludus.cli.main import main
from ludus.core.errors import UserError
from ludus.core.network import NetworkSpec
from ludus.networks.build import build_network
from ludus.networks.config import NetworkConfig
from ludus.networks.projection import MAX_STREAM_WIDTH


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("width", [8, MAX_STREAM_WIDTH, MAX_STREAM_WIDTH + 1])
def test_hidden_layer_of_a_stream_is_at_most_512_wide(width: int, noisy: bool) -> None:
    assert MAX_STREAM_WIDTH == 512
    spec = NetworkSpec({"observation": (4,)}, {"value": (1,), "advantage": (3,)}, streams=True, noisy=noisy)
    network: Any = build_network(NetworkConfig(hidden=(width,)), spec)
    for name, (size,) in spec.outputs.items():
        stream = network.projections[name]
        assert (stream.hidden.in_features, stream.hidden.out_features) == (width, min(width, 512))
        assert (stream.last.in_features, stream.last.out_features) == (min(width, 512), size)


def test_noisy_layer_without_a_stream_takes_all_features() -> None:
    spec = NetworkSpec({"observation": (4,)}, {"q": (3,)}, noisy=True)
    network: Any = build_network(NetworkConfig(hidden=(600,)), spec)
    assert (network.projections["q"].in_features, network.projections["q"].out_features) == (600, 3)


class Own(nn.Module):
    """A custom network."""


def test_error_for_noisy_custom_networks_names_the_flag() -> None:
    spec = NetworkSpec({"observation": (4,)}, {"q": (3,)}, noisy=True)
    with pytest.raises(UserError, match=r"noisy layers, which custom networks.*--agent\.no-noisy"):
        build_network(NetworkConfig(name=f"{__name__}:Own"), spec)


AGENTS = {
    "ppo": "env.num, agent.rollout or network.hidden",
    "a2c": "env.num, agent.rollout or network.hidden",
    "vtrace": "env.num, agent.rollout or network.hidden",
    "rainbow": "env.num, agent.replay, agent.batch_size or network.hidden",
    "sac": "env.num, agent.replay, agent.batch_size or network.hidden",
    "acer": "env.num, agent.rollout, agent.replay or network.hidden",
}


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_out_of_memory_names_settings_of_the_agent(
    agent: str, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(train, "run", fill)
    assert main(["train", "CartPole-v1", "--agent", agent]) == 2
    assert capsys.readouterr().err == f"ludus: There is not enough memory: lower {AGENTS[agent]}.\n"


def test_out_of_memory_is_reported_without_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(argv: list[str]) -> Any:
        raise MemoryError

    monkeypatch.setattr(train, "parse", fill)
    assert main(["train", "CartPole-v1"]) == 2
    assert capsys.readouterr().err == "ludus: There is not enough memory: lower env.num or network.hidden.\n"
