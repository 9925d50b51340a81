"""``ludus evaluate RUN ...``: evaluate trained policies on new episodes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ludus.cli.arguments import parse
from ludus.cli.output import by_agent, say
from ludus.core.text import printable
from ludus.runs.folder import RunDirectory, check_checkpoint_name
from ludus.settings.settings import check_minimum

if TYPE_CHECKING:  # it imports torch, and `--help` should not
    from ludus.containers.evaluate import Evaluation
    from ludus.runs.evaluate import Task
    from ludus.runs.policy import Player


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Evaluate trained policies on new episodes."""

    # folders of runs, folders with several runs (the latest of each is used), or latest
    run: Annotated[tuple[str, ...], "RUN [RUN ...]"]
    episodes: int = 100  # number of episodes; more give a narrower confidence interval
    checkpoint: str = "best"  # best, latest, or a step such as step_50000
    stochastic: bool = False  # sample actions as in training, instead of the most likely one
    seed: int = 0  # seed of the environments
    # processes that play episodes (Linux); the returns are the same with any number
    workers: int = 1
    json: bool = False  # print one line of JSON per run, with all returns and lengths
    # import the classes that the run's config.toml names, even if you did not create it on this machine
    trust: bool = False
    runs: Annotated[str, "FOLDER"] = "runs"  # folder in which to look for latest


def run(argv: list[str]) -> int:
    """Evaluate and print."""
    arguments = parse(Arguments, argv, "evaluate")
    check_minimum("--episodes", arguments.episodes, 1)
    check_minimum("--seed", arguments.seed, 0)
    check_minimum("--workers", arguments.workers, 1)
    check_checkpoint_name(arguments.checkpoint)
    folders = [RunDirectory.open(name, arguments.runs).path for name in arguments.run]  # before torch is imported
    if arguments.workers > 1:
        evaluate_in_parallel(arguments, folders)
        return 0
    for index, folder in enumerate(folders):
        task = load_task(arguments, folder)
        task.player.use_threads()
        if not arguments.json:
            say("\n" * (index > 0) + title(arguments, task))
        evaluation = task.player.evaluate(arguments.episodes, arguments.seed, not arguments.stochastic)
        show(arguments, task, evaluation)
        task.player.close()
    return 0


def evaluate_in_parallel(arguments: Arguments, folders: list[Path]) -> None:
    """Evaluate all runs in worker processes, then print their results."""
    from ludus.runs.evaluate import evaluate_in_processes

    tasks = [load_task(arguments, folder) for folder in folders]
    greedy, bar = not arguments.stochastic, sys.stderr.isatty() and not arguments.json

    def on_done(done: int, total: int) -> None:
        if bar:
            print(f"\r{done} of {total} parts", end="\n" if done == total else "", file=sys.stderr, flush=True)

    def warn(text: str) -> None:
        print(printable(f"ludus: {text}."), file=sys.stderr, flush=True)

    evaluations = evaluate_in_processes(
        tasks, arguments.episodes, arguments.seed, greedy, arguments.workers, on_done, warn
    )
    for index, (task, evaluation) in enumerate(zip(tasks, evaluations, strict=True)):
        if not arguments.json:
            say("\n" * (index > 0) + title(arguments, task))
        show(arguments, task, evaluation)
        task.player.close()


def load_task(arguments: Arguments, folder: Path) -> Task:
    """Load the policy of a run."""
    from ludus.runs.evaluate import Task
    from ludus.runs.policy import load

    checkpoint = RunDirectory(folder).resolve_checkpoint(arguments.checkpoint)
    player = load(folder, checkpoint, arguments.runs, trust=arguments.trust)
    return Task(folder, checkpoint, arguments.runs, arguments.trust, player)


def title(arguments: Arguments, task: Task) -> str:
    """Describe the policy."""
    player, why = task.player, " (there is no best policy before the first evaluation)"
    step = f", step {player.meta['step']:,}" if "step" in player.meta else ""
    policy = f"the {task.checkpoint} policy of {task.run}{step}{why if task.checkpoint != arguments.checkpoint else ''}"
    return f"{player.settings.env.id}, {player.settings.agent_names}: {policy}"


def show(arguments: Arguments, task: Task, evaluation: Evaluation) -> None:
    """Print a result."""
    if not arguments.json:
        from ludus.managers.roles import agents_of

        own = {agent: evaluation.infos[f"return/{agent}"] for agent in agents_of(task.player.observation)}
        say(report(evaluation, own))
        return
    about = {"run": str(task.run), "checkpoint": task.checkpoint, "seed": arguments.seed}
    print(json.dumps(about | describe(task.player, evaluation, not arguments.stochastic)), flush=True)


def interval(evaluation: Evaluation) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean return."""
    half = 1.96 * evaluation.std / math.sqrt(max(len(evaluation.returns) - 1, 1))
    return evaluation.mean - half, evaluation.mean + half


def report(evaluation: Evaluation, own: Mapping[str, float]) -> str:
    """Format mean, confidence interval, spread and range of returns and lengths; ``own`` are returns of agents."""
    returns, lengths = evaluation.returns, evaluation.lengths
    low, high = interval(evaluation)
    return "\n".join(
        [
            f"episodes  {len(returns)}",
            f"return    {evaluation.mean:.2f}{by_agent(own)}  (95% confidence interval {low:.2f} to {high:.2f})",
            f"          std {evaluation.std:.2f}, min {min(returns):.2f}, max {max(returns):.2f}",
            f"length    {sum(lengths) / len(lengths):.1f}  (min {min(lengths)}, max {max(lengths)})",
        ]
    )


def describe(player: Player, evaluation: Evaluation, greedy: bool) -> dict[str, Any]:
    """Return the result as JSON data."""
    low, high = interval(evaluation)
    return {
        "environment": player.settings.env.id,
        "agent": player.settings.agent_names,
        "step": player.meta.get("step"),
        "greedy": greedy,
        "episodes": len(evaluation.returns),
        "mean": evaluation.mean,
        "interval": [low, high],
        "std": evaluation.std,
        "min": min(evaluation.returns),
        "max": max(evaluation.returns),
        "mean_length": evaluation.mean_length,
        "infos": dict(evaluation.infos),
        "returns": evaluation.returns,
        "lengths": evaluation.lengths,
    }
