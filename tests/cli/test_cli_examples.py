"""The examples run as their docstrings say."""

import importlib
import sys
from pathlib import Path

import pytest

from ludus.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT_RUN = ["--nb-step", "64", "--env.num", "2", "--agent.rollout", "16", "--evaluation.episodes", "2", "--quiet"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_my_environment() -> None:
    assert main(["check", "my_environment:Docking"]) == 0
    assert main(["train", "my_environment:Docking", *SHORT_RUN]) == 0
    assert main(["play", "latest", "--out", "film.gif"]) == 0
    assert main(["resume", "latest", "--nb-step", "128"]) == 0
    assert "were restored exactly" in next(Path("runs").glob("*/*/log.txt")).read_text()


def test_my_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "CartPole-v1", "--network", "my_network:Residual", *SHORT_RUN]) == 0
    assert main(["evaluate", "latest", "--episodes", "1"]) == 0


def test_my_graph_network() -> None:
    flags = ["--env.max-length", "6", "--network", "my_graph_network:MessagePassing"]
    assert main(["train", "ludus.environments.entity_toy:NeighbourEnv", *flags, *SHORT_RUN]) == 0


def test_my_skirmish(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--env.max-length", "6", "--agent.heads", "place=spatial", "target=pointer(units)"]
    assert main(["show", "network", "my_skirmish:Skirmish", *flags]) == 0
    assert "head3d: joined" in capsys.readouterr().out
    assert main(["check", "my_skirmish:Skirmish", *flags]) == 0
    assert main(["train", "my_skirmish:Skirmish", *flags, *SHORT_RUN]) == 0
    assert main(["resume", "latest", "--nb-step", "128"]) == 0


def test_my_agent() -> None:
    flags = [
        "--agent",
        "my_agent:CalmPPO",
        "--preset",
        "cartpole/ppo",
        "--agent.calm-coef",
        "0.01",
        "--log-every",
        "32",
    ]
    assert main(["train", "CartPole-v1", *flags, *SHORT_RUN]) == 0
    (metrics,) = Path("runs").glob("*/*/metrics.jsonl")
    assert "calm" in metrics.read_text()


def test_train_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("train_in_python").main(nb_step=2_000)
    assert "One episode: return" in capsys.readouterr().out
    sys.modules.pop("train_in_python")
