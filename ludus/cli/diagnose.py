"""``ludus diagnose RUN``: recompute the failed update of a run and show where the first NaN or Inf appears."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ludus.cli.arguments import parse
from ludus.cli.output import say
from ludus.runs.folder import RunDirectory

NOT_REPRODUCED = 1  # exit code


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Recompute the failed update of a run and show where the first NaN or Inf appears.

    The exit code is 0 if the failure is reproduced and 1 if it is not.
    """

    # folder of a run, folder with several runs (the latest is used), or latest
    run: Annotated[str, "RUN"]
    # import the classes that the run's config.toml names, even if you did not create it on this machine
    trust: bool = False
    # folder in which to look for latest
    runs: Annotated[str, "FOLDER"] = "runs"


def run(argv: list[str]) -> int:
    """Diagnose and print."""
    arguments = parse(Arguments, argv, "diagnose")
    directory = RunDirectory.open(arguments.run, arguments.runs)  # report a wrong name before importing torch
    from ludus.runs.failure import diagnose

    found = diagnose(directory, arguments.trust)
    say(f"{found.settings.env.id}, {found.settings.agent_name}: {directory.path}, step {found.step:,}")
    say(found.message)
    if not found.findings:
        say(
            "Not reproduced: recomputing the update gives finite numbers. The failure may depend on state that is not "
            "saved (a counter in the agent, random numbers), on a compiled update or on another machine."
        )
        return NOT_REPRODUCED
    say("Reproduced: recomputing the update gives NaN or Inf again.")
    for finding in found.findings:
        say(f"  {finding}")
    return 0
