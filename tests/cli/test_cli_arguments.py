import re
from collections.abc import Callable
from typing import Any

import pytest

from ludus.agents import AGENTS
from ludus.cli.arguments import known_flags
from ludus.cli.check import run as check
from ludus.cli.main import main
from ludus.cli.train import SOURCES, parse
from ludus.core.errors import UserError
from ludus.settings.settings import ALIASES, resolve_settings, setting_types, to_flat

LINES: dict[str, dict[str, Any]] = {
    "--agent.learning-rate 1e-4": {"agent.learning_rate": 1e-4},
    "--agent.learning-rate=1e-4 --seed=3": {"agent.learning_rate": 1e-4, "seed": 3},
    "--agent.learning_rate 1e-4": {"agent.learning_rate": 1e-4},
    "--network.hidden 32 16 --quiet": {"network.hidden": (32, 16), "quiet": True},
    "--network.hidden": {"network.hidden": ()},
    '--env.options gravity=5 name="x"': {"env.options": ("gravity=5", 'name="x"')},
    "--evaluation.no-greedy --agent.normalize-reward": {"evaluation.greedy": False, "agent.normalize_reward": True},
    "--evaluation.stop-at -5.5": {"evaluation.stop_at": -5.5},
    "--evaluation.stop-at None": {"evaluation.stop_at": None},
    "--agent.clip-schedule constant --compile off": {"agent.clip_schedule": "constant", "compile": "off"},
    "--seed 1 --seed 2": {"seed": 2},
}


@pytest.mark.parametrize("line", LINES)
def test_flags_set_what_they_name_and_nothing_else(line: str) -> None:
    default = to_flat(resolve_settings("CartPole-v1").settings)
    assert to_flat(parse(["CartPole-v1", *line.split()]).settings) == default | LINES[line]


@pytest.mark.parametrize("agent", AGENTS)
def test_the_help_shows_all_flags_and_no_others(agent: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "CartPole-v1", "--agent", agent, "--help"])
    shown = set(re.findall(r"(?:│ |, )(--[\w.-]+)", capsys.readouterr().out)) - {"--help"}
    types = setting_types(agent)
    types.pop("agent.name")
    types = {key: kind for key, kind in types.items() if key.count(".") < 2}  # those of single networks are not listed
    taken = set(known_flags(types | SOURCES | dict.fromkeys(ALIASES, str))) - {"--tag"}
    assert shown == taken


def test_only_what_was_typed_has_the_origin_flag() -> None:
    origins = parse(["--agent.gamma", "0.5", "CartPole-v1", "--stop-at", "475", "--evaluation.no-greedy"]).origins
    flags = {key for key, origin in origins.items() if origin == "flag"}
    assert flags == {"env.id", "agent.gamma", "evaluation.stop_at", "evaluation.greedy"}


def test_short_flags_name_agent_network_and_target() -> None:
    settings = parse(
        ["CartPole-v1", "--agent", "a2c", "--network", "my.mod:Net", "--stop-at", "475", "--agent.n-step", "5"]
    ).settings
    assert (settings.agent_name, settings.network.name) == ("a2c", "my.mod:Net")
    assert (settings.evaluation.stop_at, settings.agent.n_step) == (475.0, 5)


def test_a_preset_by_name_decides_the_agent_and_so_the_flags() -> None:
    settings = parse(["Acrobot-v1", "--preset", "cartpole/a2c", "--agent.n-step", "5"]).settings
    assert (settings.agent_name, settings.agent.n_step, settings.env.id) == ("a2c", 5, "Acrobot-v1")


def test_preset_none_turns_the_preset_off() -> None:
    resolved = parse(["CartPole-v1", "--preset", "none"])
    assert not any(origin.startswith("preset") for origin in resolved.origins.values())


@pytest.mark.parametrize("line", ["--network.hidden 32 16 CartPole-v1", "--network.hidden 32 16 --seed 3 CartPole-v1"])
def test_a_list_of_numbers_ends_where_the_environment_begins(line: str) -> None:
    settings = parse(line.split()).settings
    assert (settings.env.id, settings.network.hidden) == ("CartPole-v1", (32, 16))


@pytest.mark.parametrize(
    ("command", "line", "said"),
    [
        (parse, "--env.options gravity=1.0 CartPole-v1", '"CartPole-v1" was read as a value of --env.options'),
        (check, "--env.options gravity=1.0 CartPole-v1", '"CartPole-v1" was read as a value of --env.options'),
        (parse, "--network.hidden CartPole-v1", '"CartPole-v1" was read as a value of --network.hidden'),
        (parse, "--network.hidden 64 64", "No environment was given"),
        (parse, "--env.options gravity=1.0", "No environment was given"),
        (parse, "CartPole-v1 --network.hidden 32 wide", 'got "CartPole-v1" and "wide"'),
        (parse, "--seed 3", "No environment was given"),
    ],
)
def test_a_list_that_took_the_environment_says_so(command: Callable[[list[str]], Any], line: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        command(line.split())


def test_a_flag_given_twice_counts_as_the_last_one_says() -> None:
    line = "CartPole-v1 --agent ppo --preset none --agent a2c --preset cartpole/a2c --agent.n-step 2"
    settings = parse(line.split()).settings
    assert (settings.agent_name, settings.agent.rollout) == ("a2c", 5)


def test_two_words_after_tag_are_told_how_to_give_both() -> None:
    with pytest.raises(UserError, match=r'got "CartPole-v1" and "b"\. Give several tags as --tags a b, or as --tag'):
        parse(["CartPole-v1", "--tag", "a", "b"])
    with pytest.raises(UserError, match=r'got "CartPole-v1" and "b"\.$'):
        parse(["CartPole-v1", "b"])
