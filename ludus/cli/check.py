"""``ludus check ENV``: every problem of an environment at once, each with its fix."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from ludus.cli.arguments import parse
from ludus.core.errors import UserError
from ludus.environments.config import Backend, EnvConfig
from ludus.environments.findings import Problem

PROBLEMS = 2  # exit code


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Try an environment with random actions and show every problem, each with its fix."""

    # A Gymnasium id, or your own as package.module:Class.
    environment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    # Arguments of its constructor as key=value, the value as in TOML (gravity=-5.0 slow=true).
    options: Annotated[tuple[str, ...], tyro.conf.arg(name="env.options")] = ()
    # Steps after which an episode is truncated; 0 keeps the environment's own limit.
    max_episode_steps: Annotated[int, tyro.conf.arg(name="env.max-episode-steps")] = 0
    # What steps it in training; an EnvPool id (Pong-v5) needs envpool.
    backend: Annotated[Backend, tyro.conf.arg(name="env.backend")] = "auto"
    # The key of the action mask in the observation dict or in info.
    mask: Annotated[str, tyro.conf.arg(name="env.mask")] = "action_mask"


def run(argv: list[str]) -> int:
    """Print the problems; the exit code is 2 if any of them is an error."""
    given = parse(Arguments, argv, "check", prefix="env.")  # the same flags as in `ludus train`
    config = EnvConfig(
        id=given.environment,
        backend=given.backend,
        options=given.options,
        max_episode_steps=given.max_episode_steps,
        mask=given.mask,
    )
    problems = find_problems(config)
    errors = [problem for problem in problems if problem.severity == "error"]
    console = Console()
    for problem in problems:
        colour = "red" if problem.severity == "error" else "yellow"
        console.print(Text.assemble((problem.severity, f"bold {colour}"), f"  {problem.what}\n    fix: {problem.fix}"))
    again = f"ludus {{}} {shlex.join(argv)}"
    if errors:
        console.print(
            Text(f"{config.id}: {len(errors)} to fix; then type `{again.format('check')}` again."), soft_wrap=True
        )
        return PROBLEMS
    console.print(Text(f"{config.id} is ready; type `{again.format('train')}`."), soft_wrap=True)
    return 0


def find_problems(config: EnvConfig) -> list[Problem]:
    """Inspect an environment; those of EnvPool are sound, so there only its name, options and spaces can be wrong."""
    if config.backend != "envpool":
        from ludus.environments.check import check

        return check(config)
    from ludus.managers.make import make_manager

    try:
        make_manager(config, 1).close()
    except UserError as error:
        return [Problem(f"It cannot be made: {error}", "Do what the message says.")]
    return []
