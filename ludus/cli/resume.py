"""``ludus resume RUN``: resume a run that was stopped or killed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ludus.cli.arguments import UnknownFlag, known_flags, parse
from ludus.cli.train import report_end
from ludus.core.errors import UserError
from ludus.runs.folder import RunDirectory
from ludus.settings.config_file import read_config


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Resume a run that was stopped or killed; the result is the same as without the interruption."""

    # folder of a run, folder with several runs (the latest is used), or latest
    run: Annotated[str, "RUN"]
    # new total number of environment steps, to extend a complete run
    nb_step: Annotated[int | None, "N"] = None
    # new return at which to stop, to extend a run that reached it
    stop_at: Annotated[float | None, "X"] = None
    # another device (cpu or cuda); results may then differ in the last digits
    device: Annotated[str | None, "D"] = None
    # another address of the Ray cluster, if it was started again elsewhere
    cluster: Annotated[str | None, "ADDRESS"] = None
    # import the classes that the run's config.toml names, even if you did not create it on this machine
    trust: bool = False
    # folder in which to look for latest
    runs: Annotated[str, "FOLDER"] = "runs"


def run(argv: list[str]) -> int:
    """Resume and print the next commands."""
    arguments = _parse(argv)
    folder = RunDirectory.open(arguments.run, arguments.runs).path  # report a wrong name before importing torch
    from ludus.runs.train import resume

    result = resume(
        folder,
        nb_step=arguments.nb_step,
        stop_at=arguments.stop_at,
        device=arguments.device,
        cluster=arguments.cluster,
        runs=arguments.runs,
        trust=arguments.trust,
    )
    config = read_config(folder / "config.toml")
    return report_end(result, Path(arguments.runs), str(config.get("env.id")), bool(config.get("quiet")))


def _parse(argv: list[str]) -> Arguments:
    """Parse the flags; explain that a resume cannot change other settings."""
    try:
        return parse(Arguments, argv, "resume")
    except UnknownFlag as error:
        from ludus.cli.train import SOURCES
        from ludus.settings.settings import ALIASES, DEFAULT_AGENT, setting_types

        known = known_flags(setting_types(DEFAULT_AGENT) | SOURCES | dict.fromkeys(ALIASES, str))
        is_setting = error.key.startswith("agent.") or error.flag.replace("_", "-") in known
        if error.key == "evaluation.stop_at" or not is_setting:
            raise
        raise UserError(
            f"Unknown flag {error.flag}: a resume can only change --nb-step, --stop-at, --device and --cluster. To "
            "change other settings, start a new run from its policy: `ludus train ENV --init-from RUN "
            f"{error.flag} ...`."
        ) from None
