"""``ludus show preprocess``: shapes and types before and after each op."""

from __future__ import annotations

import re

import pytest

from ludus.cli.main import main

CATCH = "ludus.environments.image_toy:CatchEnv"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["show", "preprocess", *words]) == 0
    return capsys.readouterr().out


def test_every_op_with_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = [
        "grayscale, resize(height=18, width=18), stack(n=3)",
        "previous_action",
        'observation: rename(to="eye")',
    ]
    rewards = ["--preprocess.reward", "scale(by=0.5), sign", "--preprocess.action", "repeat(n=2)"]
    lines = shown(capsys, CATCH, "--preprocess.observation", *pipeline, *rewards).splitlines()
    expected = [
        r"observation +uint8 +\(36, 36, 3\)",
        r"├─ grayscale +environment +uint8 +\(36, 36\)",
        r"├─ resize\(height=18, width=18\) +environment +uint8 +\(18, 18\)",
        r"├─ stack\(n=3\) +manager +uint8 +\(3, 18, 18\)",
        r'├─ rename\(to="eye"\) +device +uint8 +\(3, 18, 18\)',
        r"└─ network: eye +device +float32 +\(3, 18, 18\)",
        r"previous_action +environment +int8 +\(3,\)",
        r"└─ network: previous_action +device +float32 +\(3,\)",
        r"reward +float32 +\(\)",
        r"├─ scale\(by=0.5\) +device",
        r"└─ sign +device",
        r"action +int64 +\(\)",
        r"└─ repeat\(n=2\) +environment",
    ]
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_masks_and_what_networks_do_not_see(capsys: pytest.CaptureFixture[str]) -> None:
    lists = ["ludus.environments.entity_toy:MatchEnv", "--env.max-length", "8"]
    out = shown(capsys, *lists, "--preprocess.observation", "pad(shape=[10, 16])")
    assert re.search(r"mask: \S+/mask +device +bool +\(10,\)", out)
    out = shown(capsys, "CartPole-v1", "--preprocess.observation", "previous_reward", "previous_reward: drop")
    assert re.search(r"├─ drop +device +float32 +\(\)\n└─ not seen by networks\n", out)
    assert "network: observation" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "No environment was given"),
        (["CartPole-v1", "--preprocess.observation", "grayscale"], "it takes colour images"),
        (["CartPole-v1", "--preprocess.reward", "clip(low=1)"], "missing 1 required"),
        (["CartPole-v1", "--preprocess.observation", "symlogg"], 'Did you mean "symlog"'),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "preprocess", *words]) == 2
    assert message in capsys.readouterr().err
