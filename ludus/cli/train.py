"""``ludus train ENV``: train with settings from defaults, preset, file and flags."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ludus.agents import AGENTS
from ludus.cli import INTERRUPTED
from ludus.cli.arguments import (
    UnknownFlag,
    known_flags,
    read_words,
    refuse_missing_positional,
    single_positional,
    wants_help,
)
from ludus.cli.help import show_help
from ludus.cli.output import say
from ludus.core.errors import UserError
from ludus.settings.settings import (
    ALIASES,
    NO_PRESET,
    Resolved,
    Settings,
    chosen_agent,
    chosen_roles,
    find_preset,
    resolve_settings,
    setting_types,
)

if TYPE_CHECKING:  # it imports torch, and `--help` should not
    from ludus.runs.train import TrainResult

SOURCES = {"preset": str, "config": str, "trust": bool}  # flags that select where settings come from
PLACEHOLDER = "ENV"  # in the help, if no environment was given


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train an agent on an environment.

    The defaults shown are those for ENV, including its preset (tuned settings) and --config.
    """

    # a Gymnasium id such as CartPole-v1, or your own environment as package.module:Class
    environment: Annotated[str, "ENV"]
    # tuned settings by name; by default the preset for this environment and agent; none: no preset
    preset: Annotated[str, "NAME"] = NO_PRESET
    # settings in a TOML file, such as the config.toml of another run
    config: Annotated[str, "FILE"] = ""
    # import the classes that --config, --init-from, agent.teacher and a run in --data name, even if you did not write
    # them on this machine
    trust: bool = False
    # short for --network.name
    network: Annotated[str, "NAME"] = ""
    # short for --data.path
    data: Annotated[str, "FILE|RUN"] = ""
    # short for --evaluation.stop-at
    stop_at: float | None = None
    # short for --roles.agents
    roles: Annotated[str, "ROLE=AGENT,..."] = ""
    # short for --distrib.ranks
    ranks: int = 0
    # short for --impala.workers
    workers: int = 2
    # short for --impala.cluster
    cluster: Annotated[str, "ADDRESS"] = ""
    settings: Settings[Any]


def run(argv: list[str]) -> int:
    """Train and print the next commands."""
    resolved = parse(argv)
    from ludus.runs.train import train_resolved

    result = train_resolved(resolved, trust=_trusts(argv))
    settings = resolved.settings
    return report_end(result, Path(settings.runs), settings.env.id, settings.quiet)


def report_end(result: TrainResult, runs: Path, environment: str, quiet: bool) -> int:
    """Print the commands to try next, or the run's folder if ``quiet``; return the exit code."""
    stopped = result.reason.startswith("SIG")
    from ludus.runs.train import follows

    if follows():
        return INTERRUPTED if stopped else 0
    if quiet and not sys.stdout.isatty():
        print(result.run)  # for scripts
    else:
        say(result.run if quiet else next_commands(result.run, runs, stopped, environment))
    return INTERRUPTED if stopped else 0


def parse(argv: list[str], command: str = "train") -> Resolved:
    """Parse the command line into settings and their origins; print the help and exit if asked to."""
    help_wanted = wants_help(argv)
    words = [word for word in argv if word not in ("--help", "-h")]
    agent, preset, file = (_peek(words, flag) for flag in ("--agent", "--preset", "--config"))
    roles = _peek(words, "--roles") or _peek(words, "--roles.agents")
    trust = _trusts(words)
    chosen = chosen_agent(agent, preset, file, trust)
    types = setting_types(chosen, chosen_roles(roles, file, trust))
    short = {flag: types[key] for flag, key in ALIASES.items()}
    types.pop("agent.name")  # only --agent sets it, because it decides which flags there are
    positional, values, unknown = read_words(words, known_flags(types | SOURCES | short))
    _refuse_positional_agent(positional)  # before its flags, which look unknown
    environment = single_positional(positional, command, values)
    if unknown is not None:
        raise _name_agents(unknown, chosen)
    overrides = {ALIASES.get(key, key): value for key, value in values.items() if key not in SOURCES}
    if environment is None and "env.id" not in overrides and file is None and not help_wanted:
        refuse_missing_positional(values, command)
    if environment and overrides.get("env.id", environment) != environment:
        raise UserError(f'Two environments were given, "{environment}" and "{overrides["env.id"]}": leave one out.')
    if help_wanted and environment is None and file is None:
        environment = PLACEHOLDER
    resolved = resolve_settings(environment, None, preset, file, overrides, trust=trust)
    if help_wanted:
        _show_help(resolved.settings, preset, file)
    return resolved


def _refuse_positional_agent(positional: list[str]) -> None:
    """Raise on ``ludus train ENV AGENT``."""
    if len(positional) > 1 and (agents := [word for word in positional if word in AGENTS]):
        raise UserError(f'"{agents[0]}" is an agent: write --agent {agents[0]}.')


def _name_agents(unknown: UnknownFlag, agent: str) -> UserError:
    """Return the error for an unknown flag; for one of other agents, name them."""
    from ludus.settings.ineffective import agents_with_setting

    plain = unknown.key.replace("agent.no_", "agent.", 1)  # the flag may turn a setting off
    who = agents_with_setting(unknown.key, agent) or agents_with_setting(plain, agent)
    return UserError(f"Unknown flag {unknown.flag}: {who}.") if who else unknown


def next_commands(run: Path, runs: Path, stopped: bool, environment: str) -> str:
    """Return the commands to try next."""
    from ludus.environments.gym import cannot_render

    this, curves = shlex.quote(str(run)), runs if run.is_relative_to(runs) else run
    return "\n".join(
        [
            *([f"Resume:    {_command('ludus')} resume {this}"] if stopped else []),
            *([] if cannot_render(environment) else [f"Watch:     {_command('ludus')} play {this}"]),
            f"Evaluate:  {_command('ludus')} evaluate {this}",
            f"Curves:    {_command('tensorboard')} --logdir {shlex.quote(str(curves))}",
        ]
    )


def _command(command: str) -> str:
    """Return the name of a command, or its path if the shell would not find it."""
    beside = Path(sys.executable).parent / command
    if shutil.which(command) or not beside.exists():
        return command
    near = os.path.relpath(beside)
    return str(beside) if near.startswith("..") else near


def _trusts(words: list[str]) -> bool:
    """Whether --trust is given; the last of --trust and --no-trust counts."""
    given = [word for word in words if word in ("--trust", "--no-trust")]
    return given[-1:] == ["--trust"]


def _peek(words: list[str], flag: str) -> str | None:
    """Return the value of a flag that decides which other flags exist; it is validated later."""
    found = None  # the last one counts
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
        data=settings.data.path,
        stop_at=settings.evaluation.stop_at,
        roles=settings.roles.agents,
        ranks=settings.distrib.ranks,
        workers=settings.impala.workers,
        cluster=settings.impala.cluster,
        settings=settings,
    )
    show_help(shown, "train")
