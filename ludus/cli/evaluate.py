"""``ludus evaluate RUN …``: how good trained policies are, on fresh episodes."""

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
    """Play many fresh episodes with trained policies and say how good they are."""

    # Folders of runs, folders of several runs (the latest of each is taken), or latest.
    run: Annotated[tuple[str, ...], "RUN [RUN ...]"]
    episodes: int = 100  # more give a narrower interval
    checkpoint: str = "best"  # which policy: best, latest, or one of a run's checkpoints such as step_50000
    stochastic: bool = False  # sample actions as in training, instead of taking the likeliest
    seed: int = 0  # of the environments; another seed gives other episodes
    json: bool = False  # print one JSON object per run and line, each return and length included
    trust: bool = False  # import what the run's config.toml names, though you did not make it on this machine
    runs: Annotated[str, "FOLDER"] = "runs"  # where latest is looked for


def run(argv: list[str]) -> int:
    """Evaluate and print."""
    given = parse(Arguments, argv, "evaluate")
    check_minimum("--episodes", given.episodes, 1)
    check_minimum("--seed", given.seed, 0)
    check_checkpoint_name(given.checkpoint)
    folders = [RunDirectory.open(name, given.runs).path for name in given.run]  # before torch is imported
    from ludus.runs.policy import load

    for index, folder in enumerate(folders):
        checkpoint = RunDirectory(folder).resolve_checkpoint(given.checkpoint)
        player = load(folder, checkpoint, given.runs, trust=given.trust)
        player.use_threads()
        if not given.json:
            why = "" if checkpoint == given.checkpoint else " (no evaluation has chosen a best one yet)"
            say("\n" * (index > 0) + title(player, checkpoint, folder) + why)
        evaluation = player.evaluate(given.episodes, given.seed, not given.stochastic)
        if given.json:
            about = {"run": str(folder), "checkpoint": checkpoint, "seed": given.seed}
            print(json.dumps(about | describe(player, evaluation, not given.stochastic)), flush=True)
        else:
            say(report(evaluation))
        player.close()
    return 0


def title(player: Player, checkpoint: str, folder: object) -> str:
    """Which policy it is."""
    step = f", step {player.meta['step']:,}" if "step" in player.meta else ""
    return f"{player.settings.env.id}, {player.settings.agent_name}: the {checkpoint} policy of {folder}{step}"


def interval(evaluation: Evaluation) -> tuple[float, float]:
    """The 95% interval of the mean; n − 1: the spread is measured around the sample's own mean."""
    half = 1.96 * evaluation.std / math.sqrt(max(len(evaluation.returns) - 1, 1))
    return evaluation.mean - half, evaluation.mean + half


def report(evaluation: Evaluation) -> str:
    """Mean, 95% interval of the mean, spread and range of returns, and the lengths."""
    returns, lengths = evaluation.returns, evaluation.lengths
    low, high = interval(evaluation)
    return "\n".join(
        [
            f"episodes  {len(returns)}",
            f"return    {evaluation.mean:.2f}  (95% interval {low:.2f} to {high:.2f})",
            f"          std {evaluation.std:.2f}, min {min(returns):.2f}, max {max(returns):.2f}",
            f"length    {sum(lengths) / len(lengths):.1f}  (min {min(lengths)}, max {max(lengths)})",
        ]
    )


def describe(player: Player, evaluation: Evaluation, greedy: bool) -> dict[str, Any]:
    """The same for a program to read."""
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
