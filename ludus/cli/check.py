"""``ludus check ENV``: report all problems of an environment, each with a fix."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Callable
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


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Run an environment with random actions and report all problems, each with a fix.

    Takes all flags of `ludus train`; the agent, the network and the memory they need are checked too.
    """

    # a Gymnasium id such as CartPole-v1, or your own environment as package.module:Class
    environment: Annotated[str, "ENV"]
    # as for training
    env: EnvConfig = field(default_factory=lambda: EnvConfig(id=""))


def run(argv: list[str]) -> int:
    """Print the problems; the exit code is 2 if any of them is an error."""
    if wants_help(argv):
        show_help(Arguments, "check")
    resolved = parse(argv, "check")
    config = resolved.settings.env
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame needs no screen then
    problems, tried = find_problems(config)
    if all(problem.severity == "warning" for problem in problems):
        from ludus.runs.train import check_settings  # imports torch

        problems += refusals(lambda: check_settings(resolved, "--trust" in argv))  # no network fits, or no memory
    errors = [problem for problem in problems if problem.severity == "error"]
    console = Console()
    for problem in problems:
        colour = "red" if problem.severity == "error" else "yellow"
        console.print(Text.assemble((problem.severity, f"bold {colour}"), f"  {problem.what}"))
        console.print(Padding(Text(f"fix: {problem.fix}"), (0, 0, 0, 4)))
    again = f"ludus {{}} {shlex.join(argv)}"
    if errors:
        console.print(
            Text(f"{config.id}: {len(errors)} error{'s' * (len(errors) > 1)}; fix, then `{again.format('check')}`."),
            soft_wrap=True,
        )
        return BAD_INPUT
    console.print(Text(f"{config.id} is ready for training{tried}: `{again.format('train')}`."), soft_wrap=True)
    return 0


def find_problems(config: EnvConfig) -> tuple[list[Problem], str]:
    """Return the problems of an environment, and a note on how much was tested.

    EnvPool's environments are not stepped: only their name, options and spaces are checked.
    """
    if config.backend == "envpool":
        from ludus.managers.make import make_manager

        return refusals(lambda: make_manager(config, 1).close()), " (not stepped)"
    from ludus.environments.check import check_environment

    if config.backend == "auto" and _only_in_envpool(config.id):
        import gymnasium

        fix = f"Add --env.backend envpool.{did_you_mean(config.id, gymnasium.registry)}"
        return [Problem(f'Gymnasium has no environment "{config.id}", but EnvPool does.', fix)], ""
    found = check_environment(config)
    episodes = f"{found.episodes} episode{'s' * (found.episodes != 1)}"
    return found.problems, f" (tested with {found.tried} random steps in {episodes})"


def refusals(call: Callable[[], object]) -> list[Problem]:
    """Return the UserError that a call raises, as a problem."""
    try:
        call()
    except UserError as error:
        return [problem_from_error(error)]
    return []


def _only_in_envpool(id: str) -> bool:
    from ludus.environments.gym import find_spec, is_path

    if is_path(id) or importlib.util.find_spec("envpool") is None:
        return False
    try:
        find_spec(id)
    except UserError:
        import envpool

        return id in envpool.list_all_envs()
    return False
