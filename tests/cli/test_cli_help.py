"""Help and lists read well: within the terminal's width, every setting in words, no placeholder shown as a value."""

import re

import pytest

from ludus.agents import AGENTS
from ludus.cli.help import INDENT
from ludus.cli.main import COMMANDS, main

ODD = ["(default: )", "''", "{None}", "``", "[STR", "ENV)"]
PAGES = [
    *([command, "--help"] for command in COMMANDS),
    *(["train", "CartPole-v1", "--agent", agent, "--help"] for agent in AGENTS),
    *(["list", what] for what in ("all", "agents", "networks", "presets", "environments")),
]


WIDE = [words for words in PAGES if "--agent" not in words]  # the pages of agents are alike


@pytest.mark.parametrize(
    ("words", "width"),
    [*((words, 80) for words in PAGES), *((words, 120) for words in WIDE)],
    ids=lambda x: " ".join(x) if isinstance(x, list) else str(x),
)
def test_pages_fit_and_have_no_odd_values(
    words: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(words) == 0
    out = capsys.readouterr().out
    assert not [odd for odd in ODD if odd in out]
    if words[0] != "list" or "--help" in words:  # lines after a list are for a terminal to wrap
        assert max(map(len, out.splitlines())) <= width
    assert "…" not in out.replace("cuda:1, …", "").replace("NAME, …", "")  # nothing is cut off


@pytest.mark.parametrize("agent", AGENTS)
def test_every_setting_is_described(
    agent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    main(["train", "CartPole-v1", "--agent", agent, "--help"])
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    flags = [i for i, line in enumerate(lines) if line.startswith("--")]
    assert len(flags) > 40
    said = {}
    for i in flags:
        flag, _, text = re.sub(r"  +", "\t", lines[i]).partition("\t")
        said[flag.split(" ")[0]] = text or lines[i + 1]
    assert not [flag for flag, text in said.items() if not text or text.startswith("(default")]
    texts = list(said.values())
    assert len(texts) == len(set(texts))  # none has another's words


@pytest.mark.parametrize("command", ["play", "evaluate", "resume", "check"])
def test_every_flag_of_a_command_is_described(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    main([command, "--help"])
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    for i, line in enumerate(lines):
        if line.startswith("--"):
            text = re.sub(r"  +", "\t", line).partition("\t")[2] or lines[i + 1]
            assert not text.startswith("(default"), line


@pytest.mark.parametrize("agent", ["ppo", "rainbow", "sac"])
def test_no_word_is_wider_than_its_column(
    agent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["train", "CartPole-v1", "--agent", agent, "--help"])
    panels = re.findall(r"^╭[^\n]*╮\n(.*?)^╰", capsys.readouterr().out, re.MULTILINE | re.DOTALL)
    assert len(panels) > 5
    for panel in panels[1:]:  # after that of the environment
        lines = [line[2:-2] for line in panel.splitlines()]
        after_title = next((i + 1 for i, line in enumerate(lines) if set(line) == {"─"}), 0)
        for line in lines[after_title:]:
            assert line.startswith(("-", " " * INDENT)), line


def test_the_environment_has_no_default_until_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help"])
    assert "(required)" in capsys.readouterr().out
    main(["train", "CartPole-v1", "--help"])
    out = capsys.readouterr().out
    assert "(required)" not in out
    assert "cartpole/ppo" in out
