"""``ludus evaluate RUN ...``: evaluate trained policies on new episodes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ludus.cli.arguments import parse
from ludus.cli.output import say
from ludus.runs.folder import RunDirectory, check_checkpoint_name
from ludus.settings.settings import check_minimum

if TYPE_CHECKING:  # it imports torch, and `--help` should not
    from ludus.containers.evaluate import Evaluation
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
    json: bool = False  # print one line of JSON per run, with all returns and lengths
    # import the classes that the run's config.toml names, even if you did not create it on this machine
    trust: bool = False
    runs: Annotated[str, "FOLDER"] = "runs"  # folder in which to look for latest


def run(argv: list[str]) -> int:
    """Evaluate and print."""
    arguments = parse(Arguments, argv, "evaluate")
    check_minimum("--episodes", arguments.episodes, 1)
    check_minimum("--seed", arguments.seed, 0)
    check_checkpoint_name(arguments.checkpoint)
    folders = [RunDirectory.open(name, arguments.runs).path for name in arguments.run]  # before torch is imported
    from ludus.runs.policy import load

    for index, folder in enumerate(folders):
        checkpoint = RunDirectory(folder).resolve_checkpoint(arguments.checkpoint)
        player = load(folder, checkpoint, arguments.runs, trust=arguments.trust)
        player.use_threads()
        if not arguments.json:
            why = "" if checkpoint == arguments.checkpoint else " (there is no best policy before the first evaluation)"
            say("\n" * (index > 0) + title(player, checkpoint, folder) + why)
        evaluation = player.evaluate(arguments.episodes, arguments.seed, not arguments.stochastic)
        if arguments.json:
            about = {"run": str(folder), "checkpoint": checkpoint, "seed": arguments.seed}
            print(json.dumps(about | describe(player, evaluation, not arguments.stochastic)), flush=True)
        else:
            say(report(evaluation))
        player.close()
    return 0


def title(player: Player, checkpoint: str, folder: object) -> str:
    """Describe the policy."""
    step = f", step {player.meta['step']:,}" if "step" in player.meta else ""
    return f"{player.settings.env.id}, {player.settings.agent_name}: the {checkpoint} policy of {folder}{step}"


def interval(evaluation: Evaluation) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean return."""
    half = 1.96 * evaluation.std / math.sqrt(max(len(evaluation.returns) - 1, 1))
    return evaluation.mean - half, evaluation.mean + half


def report(evaluation: Evaluation) -> str:
    """Format mean, confidence interval, spread and range of returns and lengths."""
    returns, lengths = evaluation.returns, evaluation.lengths
    low, high = interval(evaluation)
    return "\n".join(
        [
            f"episodes  {len(returns)}",
            f"return    {evaluation.mean:.2f}  (95% confidence interval {low:.2f} to {high:.2f})",
            f"          std {evaluation.std:.2f}, min {min(returns):.2f}, max {max(returns):.2f}",
            f"length    {sum(lengths) / len(lengths):.1f}  (min {min(lengths)}, max {max(lengths)})",
        ]
    )


def describe(player: Player, evaluation: Evaluation, greedy: bool) -> dict[str, Any]:
    """Return the result as JSON data."""
    low, high = interval(evaluation)
    return {
        "environment": player.settings.env.id,
        "agent": player.settings.agent_name,
        "step": player.meta.get("step"),
        "greedy": greedy,
        "episodes": len(evaluation.returns),
        "mean": evaluation.mean,
        "interval": [low, high],
        "std": evaluation.std,
        "min": min(evaluation.returns),
        "max": max(evaluation.returns),
        "mean_length": evaluation.mean_length,
        "returns": evaluation.returns,
        "lengths": evaluation.lengths,
    }
