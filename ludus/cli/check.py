"""``ludus check ENV``: every problem of an environment at once, each with its fix."""

from __future__ import annotations

import importlib.util
import os
import shlex
from dataclasses import dataclass, field
from typing import Annotated

from rich.padding import Padding
from rich.text import Text

from ludus.cli import BAD_INPUT
from ludus.cli.arguments import wants_help
from ludus.cli.help import show_help
from ludus.cli.train import parse
from ludus.core.errors import UserError, did_you_mean
from ludus.environments.config import EnvConfig
from ludus.environments.problems import Problem, problem_from_error
from ludus.logging.terminal import Console
from ludus.settings.settings import Resolved


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Try an environment at random and show every problem, each with its fix.

    Takes all flags of `ludus train`, whose agent, network and memory are checked too.
    """

    # A Gymnasium id, or your own as package.module:Class.
    environment: Annotated[str, "ENV"]
    # As for training.
    env: EnvConfig = field(default_factory=lambda: EnvConfig(id=""))


def run(argv: list[str]) -> int:
    """Print the problems; the exit code is 2 if any of them is an error."""
    if wants_help(argv):
        show_help(Arguments, "check")
    resolved = parse(argv, "check")
    config = resolved.settings.env
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # environments that draw with pygame look for a screen else
    problems, tried = find_problems(config)
    if all(problem.severity == "warning" for problem in problems):
        problems += find_refusals(resolved, "--trust" in argv)
    errors = [problem for problem in problems if problem.severity == "error"]
    console = Console()
    for problem in problems:
        colour = "red" if problem.severity == "error" else "yellow"
        console.print(Text.assemble((problem.severity, f"bold {colour}"), f"  {problem.what}"))
        console.print(Padding(Text(f"fix: {problem.fix}"), (0, 0, 0, 4)))
    again = f"ludus {{}} {shlex.join(argv)}"
    if errors:
        console.print(
            Text(f"{config.id}: {len(errors)} to fix; then type `{again.format('check')}` again."), soft_wrap=True
        )
        return BAD_INPUT
    console.print(Text(f"{config.id} is ready{tried}; type `{again.format('train')}`."), soft_wrap=True)
    return 0


def find_problems(config: EnvConfig) -> tuple[list[Problem], str]:
    """Inspect an environment; return its problems, and in words how much was tried.

    Those of EnvPool are sound, so there only the name, options and spaces can be wrong.
    """
    if config.backend == "envpool":
        return _of_pool(config), " (no step was tried)"
    from ludus.environments.check import check_environment

    if config.backend == "auto" and _is_in_pool_alone(config.id):
        import gymnasium

        fix = f"Add --env.backend envpool.{did_you_mean(config.id, gymnasium.registry)}"
        return [Problem(f'Gymnasium has no environment "{config.id}", but EnvPool has.', fix)], ""
    found = check_environment(config)
    episodes = f"{found.episodes} episode{'s' * (found.episodes != 1)}"
    return found.problems, f" ({found.tried} random steps in {episodes} tried)"


def find_refusals(resolved: Resolved, trust: bool = False) -> list[Problem]:
    """What training would refuse of a sound environment: no network for it, or too little memory."""
    from ludus.runs.train import check_settings

    try:
        check_settings(resolved, trust)
    except UserError as error:
        return [problem_from_error(error)]
    return []


def _of_pool(config: EnvConfig) -> list[Problem]:
    from ludus.managers.make import make_manager

    try:
        make_manager(config, 1).close()
    except UserError as error:
        return [problem_from_error(error)]
    return []


def _is_in_pool_alone(id: str) -> bool:
    from ludus.environments.gym import find_spec, is_path

    if is_path(id) or importlib.util.find_spec("envpool") is None:
        return False
    try:
        find_spec(id)
    except UserError:
        import envpool

        return id in envpool.list_all_envs()
    return False
