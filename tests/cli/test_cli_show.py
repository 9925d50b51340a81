"""``ludus show network``: trees with shapes, parameters and operations, and drawings."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ludus.cli.main import main

QUESTION = "ludus.environments.image_toy:QuestionEnv"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["show", "network", *words]) == 0
    return capsys.readouterr().out


def test_tree_of_an_mlp(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "CartPole-v1", "--preset", "none")
    actor = next(line for line in out.splitlines() if line.startswith("actor"))
    parameters = 4 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2
    assert actor.split()[1:] == [f"{parameters:,}", f"{2 * (4 * 64 + 64 * 64 + 64 * 2) / 1000:.3g}k"]
    assert re.search(r"├─ source/observation: mlp +\(4,\) → \(64,\) +4,480 +8.7k", out)
    assert re.search(r"└─ output/policy/action: Linear +\(64,\) → \(2,\) +130 +256", out)
    assert re.search(r"total +9,155 +17.8k", out)


def test_tree_of_a_recurrent_network_with_two_observations(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, QUESTION, "--network.body", "lstm", "--network.shared", "yes")
    assert "actor_critic, recurrent" in out
    assert re.search(r"body: lstm +\(320,\) → \(64,\) +98,816 +197k", out)
    assert "total" not in out


def test_critics_and_their_members(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "Pendulum-v1", "--agent", "sac", "--preset", "none", "--network.hidden", "8")
    assert "critic, an ensemble of 2" in out
    actor, critic = 3 * 8 + 8 + 8 * 2 + 2, 4 * 8 + 8 + 8 + 1
    assert re.search(rf"total +{actor + 2 * critic}\b", out)
    recurrent = ["--network.body", "lstm", "--agent.sequence", "4"]
    out = shown(capsys, "Pendulum-v1", "--agent", "sac", "--preset", "none", *recurrent)
    assert "critic/memory, recurrent, an ensemble of 2" in out
    assert "critic/q_network" in out


def test_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "network.svg"
    shown(capsys, QUESTION, "--network.body", "lstm", "--network.shared", "sources", "--svg", str(file))
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in root.iter(f"{space}title")]
    bodies = [title for title in titles if title and "/body lstm" in title]
    assert len(bodies) == 2
    assert len(list(root.iter(f"{space}path"))) == 1 + 2 + 2 * 2 + 2  # the tip; to sources, bodies and outputs
    boxes = [rectangle for rectangle in root.iter(f"{space}rect") if rectangle.get("x")]
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert len(boxes) == len(titles) == 2 + 2 + 2 + 2
    for box in boxes:
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
        assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height
    places = {(box.get("x"), box.get("y")) for box in boxes}
    assert len(places) == len(boxes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "write `ludus show network ENV`"),
        (["networks", "CartPole-v1"], "write `ludus show network ENV`"),
        (["network"], "No environment was given"),
        (["network", "CartPole-v1", "--svg"], "--svg needs a value"),
        (["network", "CartPole-v1", "--svg", "no/such/folder/x.svg"], "cannot be written"),
        (["network", "CartPole-v1", "--network.body", "lstn"], 'Did you mean "lstm"'),
        (["network", "CartPole-v1", "--network.lstm-size", "8"], "would do nothing"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *words]) == 2
    assert message in capsys.readouterr().err
