"""``ludus train ENV``: settings from defaults, preset, file and flags, then a run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from ludus.cli import INTERRUPTED
from ludus.cli.arguments import Flag, UnknownFlag, known_flags, only_word, read_words, refuse_swallowed, wants_help
from ludus.cli.help import show_help
from ludus.cli.output import say
from ludus.core.errors import UserError
from ludus.settings.settings import (
    ALIASES,
    NO_PRESET,
    Resolved,
    Settings,
    chosen_agent,
    find_preset,
    resolve_settings,
    setting_types,
)

LAYERS = {
    "preset": str,
    "config": str,
    "trust": bool,
}  # flags that say where settings come from, and are no settings themselves
PLACEHOLDER = "ENV"  # stands for the environment in the help, where none was typed


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train an agent on an environment.

    Defaults are those of ENV: its preset (tuned settings) and --config are in.
    """

    # A Gymnasium id such as CartPole-v1, or your own as package.module:Class.
    environment: Annotated[str, "ENV"]
    # Tuned settings by name; one that fits is taken by itself; none: no preset.
    preset: Annotated[str, "NAME"] = NO_PRESET
    # Settings in a TOML file, such as the config.toml of another run.
    config: Annotated[str, "FILE"] = ""
    # Import what --config and --init-from name, though you did not write them on this machine.
    trust: bool = False
    # Short for --network.name.
    network: Annotated[str, "NAME"] = ""
    # Short for --evaluation.stop-at.
    stop_at: float | None = None
    settings: Settings[Any]


def run(argv: list[str]) -> int:
    """Train, and say what to type next."""
    resolved = parse(argv)
    from ludus.runs.train import train_resolved

    result = train_resolved(resolved, trust=_trusts(argv))
    stopped = result.reason.startswith("SIG")
    runs, quiet = Path(resolved.settings.runs), resolved.settings.quiet
    if quiet and not sys.stdout.isatty():
        print(result.run)  # for a script, as it is
    else:
        say(result.run if quiet else closing(result.run, runs, stopped, resolved.settings.env.id))
    return INTERRUPTED if stopped else 0


def parse(argv: list[str], command: str = "train") -> Resolved:
    """Read the command line into settings and their origins; show the help and leave where it is asked for."""
    helps = wants_help(argv)
    words = [word for word in argv if word not in ("--help", "-h")]
    agent, preset, file = (_peek(words, flag) for flag in ("--agent", "--preset", "--config"))
    trust = _trusts(words)
    chosen = chosen_agent(agent, preset, file, trust)
    types = setting_types(chosen)
    short = {flag: types[key] for flag, key in ALIASES.items()}
    types.pop("agent.name")  # --agent is the one way: it decides which flags there are
    alone, values = _read(words, known_flags(types | LAYERS | short), chosen)
    overrides = {ALIASES.get(key, key): value for key, value in values.items() if key not in LAYERS}
    environment = only_word(alone, command, values)
    if environment is None and "env.id" not in overrides and file is None and not helps:
        refuse_swallowed(values, command)
    if environment and overrides.get("env.id", environment) != environment:
        raise UserError(f'Two environments were given, "{environment}" and "{overrides["env.id"]}"; leave one out.')
    if helps and environment is None and file is None:
        environment = PLACEHOLDER
    resolved = resolve_settings(environment, None, preset, file, overrides, trust=trust)
    if helps:
        _show_help(resolved.settings, preset, file)
    return resolved


def _read(words: list[str], flags: Mapping[str, Flag], agent: str) -> tuple[list[str], dict[str, Any]]:
    """As ``read_words``; of a flag that only other agents have, say which."""
    try:
        return read_words(words, flags)
    except UnknownFlag as error:
        from ludus.settings.ineffective import agents_with_setting

        plain = error.key.replace("agent.no_", "agent.", 1)  # the flag that turns a setting off
        if who := agents_with_setting(error.key, agent) or agents_with_setting(plain, agent):
            raise UserError(f"Unknown flag {error.flag}: {who}.") from None
        raise


def closing(run: Path, runs: Path, stopped: bool, environment: str) -> str:
    """What to type next, with the path of the run as it can be typed here."""
    from ludus.environments.gym import cannot_render

    this, curves = shlex.quote(str(run)), runs if run.is_relative_to(runs) else run
    return "\n".join(
        [
            *([f"Continue it:  {_typed('ludus')} resume {this}"] if stopped else []),
            *([] if cannot_render(environment) else [f"Watch it:       {_typed('ludus')} play {this}"]),
            f"Measure it:     {_typed('ludus')} evaluate {this}",
            f"Its curves:     {_typed('tensorboard')} --logdir {shlex.quote(str(curves))}",
        ]
    )


def _typed(command: str) -> str:
    """What to type for a command: its name, or where it lies if the shell would not find it."""
    beside = Path(sys.executable).parent / command
    if shutil.which(command) or not beside.exists():
        return command
    near = os.path.relpath(beside)
    return str(beside) if near.startswith("..") else near


def _trusts(words: list[str]) -> bool:
    """Whether files may name what is imported; the last of the two flags counts."""
    given = [word for word in words if word in ("--trust", "--no-trust")]
    return given[-1:] == ["--trust"]


def _peek(words: list[str], flag: str) -> str | None:
    """The value of a flag that decides which other flags there are; whether it is well-formed is checked later."""
    found = None  # where it is given twice, the last one counts, as for every flag
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            found = words[index + 1]
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _show_help(settings: Settings[Any], preset: str | None, file: str | None) -> None:
    if settings.env.id == PLACEHOLDER:
        settings = replace(settings, env=replace(settings.env, id=""))
    shown = Arguments(
        environment=settings.env.id,
        preset=preset or find_preset(settings.env.id, settings.agent_name),
        config=file or "",
        network=settings.network.name,
        stop_at=settings.evaluation.stop_at,
        settings=settings,
    )
    show_help(shown, "train")
