"""Networks that differ between training and evaluation, or draw numbers of their own, are treated as they expect."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest
import torch
from containers_setup import saved, train
from torch import Tensor, nn

import ludus
from ludus.agents.ppo import PPOConfig
from ludus.cli.main import main
from ludus.core.agent import Agent


class Moody(nn.Module):
    """Batch statistics and dropout: both must rest in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())

    def forward(self, observation: Tensor) -> Tensor:
        return self.layers(observation)


MOODY = f"{__name__}:Moody"


def test_evaluation_moves_no_statistics_of_the_network(tmp_path: Path) -> None:
    often, never = (
        saved(train(tmp_path / str(every), "CartPole-v1", network__name=MOODY, evaluation__every=every).run)
        for every in (1, 1_000_000)
    )
    for name, x in often["agent"].items():
        assert torch.equal(x, never["agent"][name]), name


def test_a_loaded_policy_rests_and_acts_on_one_observation(tmp_path: Path) -> None:
    result = train(tmp_path, "CartPole-v1", network__name=MOODY)
    policy = result.load()
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    assert len({int(policy.act(observation)) for _ in range(20)}) == 1
    assert not policy.agent.training


def test_a_network_that_draws_numbers_repeats_itself_by_seed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = saved(train(tmp_path / "1", "CartPole-v1", network__name=MOODY).run)
    torch.manual_seed(2)
    two = saved(train(tmp_path / "2", "CartPole-v1", network__name=MOODY).run)
    for name, x in one["agent"].items():
        assert torch.equal(x, two["agent"][name]), name


def test_a_native_vector_environment_can_be_played(tmp_path: Path) -> None:
    result = train(tmp_path, "CartPole-v1", env__backend="vector")
    out = tmp_path / "film.gif"
    assert main(["play", str(result.run), "--out", str(out)]) == 0
    assert out.stat().st_size > 0


def test_an_agent_that_lacks_a_part_is_told_which(tmp_path: Path) -> None:
    with pytest.raises(ludus.UserError, match="lacks act"):
        train(tmp_path, "CartPole-v1", agent=f"{__name__}:Halfway")


class Halfway(Agent):
    Config = PPOConfig
