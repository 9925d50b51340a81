"""``ludus resume RUN``: go on with a run that was stopped or killed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ludus.cli import INTERRUPTED
from ludus.cli.arguments import UnknownFlag, known_flags, parse
from ludus.cli.output import say
from ludus.cli.train import closing
from ludus.core.errors import UserError
from ludus.runs.folder import RunDirectory
from ludus.settings.config_file import read_config


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Go on with a run that was stopped or killed, as if nothing had happened."""

    # The folder of a run, or latest.
    run: Annotated[str, "RUN"]
    # A new total of steps, for a run that has done all of its own.
    nb_step: Annotated[int | None, "N"] = None
    # A new target of the evaluation, for a run that reached its own.
    stop_at: Annotated[float | None, "X"] = None
    # Another device (cpu or cuda); the last digits may differ then.
    device: Annotated[str | None, "D"] = None
    # Import what the run's config.toml names, though you did not make it on this machine.
    trust: bool = False
    # Where latest is looked for.
    runs: Annotated[str, "FOLDER"] = "runs"


def run(argv: list[str]) -> int:
    """Resume, and say what to type next."""
    given = _parse(argv)
    folder = RunDirectory.open(given.run, given.runs).path  # a wrong name is told before torch is imported
    from ludus.runs.train import resume

    result = resume(
        folder,
        nb_step=given.nb_step,
        stop_at=given.stop_at,
        device=given.device,
        runs=given.runs,
        trust=given.trust,
    )
    stopped = result.reason.startswith("SIG")
    config = read_config(folder / "config.toml")
    quiet = config.get("quiet")
    if quiet and not sys.stdout.isatty():
        print(result.run)  # for a script, as it is
    else:
        say(result.run if quiet else closing(result.run, Path(given.runs), stopped, str(config.get("env.id"))))
    return INTERRUPTED if stopped else 0


def _parse(argv: list[str]) -> Arguments:
    """Read the flags; of one that would change a setting, say what a resume keeps."""
    try:
        return parse(Arguments, argv, "resume")
    except UnknownFlag as error:
        if error.key == "evaluation.stop_at" or not _is_setting(error):  # --stop-at is meant
            raise
        raise UserError(
            f"Unknown flag {error.flag}: a resume keeps the run's settings, of which only --nb-step, --stop-at and "
            f"--device may change; `ludus train ENV --init-from RUN {error.flag} …` begins a new run from its policy "
            "with others."
        ) from None


def _is_setting(error: UnknownFlag) -> bool:
    from ludus.cli.train import LAYERS
    from ludus.settings.settings import ALIASES, DEFAULT_AGENT, setting_types

    types = setting_types(DEFAULT_AGENT)
    known = known_flags(types | LAYERS | dict.fromkeys(ALIASES, str))
    return error.key.startswith("agent.") or error.flag.replace("_", "-") in known
