"""``ludus evaluate RUN``: how good a trained policy is, on fresh episodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ludus.cli.arguments import parse
from ludus.containers.settings import at_least
from ludus.track.rundir import RunDirectory

if TYPE_CHECKING:  # it imports torch, and `--help` should not
    from ludus.containers.evaluate import Evaluation


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Play many fresh episodes with a trained policy and say how good it is."""

    # The folder of a run, a folder of runs (its latest is taken), or latest.
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    episodes: int = 100  # more give a narrower interval
    checkpoint: Literal["best", "latest"] = "best"  # which of the run's policies
    stochastic: bool = False  # sample actions as in training, instead of taking the likeliest
    seed: int = 0  # of the environments; another seed gives other episodes
    runs: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs"  # where latest is looked for


def run(argv: list[str]) -> int:
    """Evaluate and print."""
    given = parse(Arguments, argv, "evaluate")
    at_least("--episodes", given.episodes, 1)
    at_least("--seed", given.seed, 0)
    run_folder = RunDirectory.open(given.run, given.runs).path  # a wrong name is told before torch is imported
    from ludus.containers.player import load

    player = load(run_folder, given.checkpoint, given.runs)
    player.use_threads()
    print(f"{player.settings.env.id}, {player.settings.agent_name}: the {given.checkpoint} policy of {run_folder}")
    print(report(player.evaluate(given.episodes, given.seed, not given.stochastic)))
    return 0


def report(evaluation: Evaluation) -> str:
    """Mean, 95% interval of the mean, spread and range of returns, and the lengths."""
    returns, lengths = evaluation.returns, evaluation.lengths
    mean, std = evaluation.mean, evaluation.std
    half = (
        1.96 * std / math.sqrt(max(len(returns) - 1, 1))
    )  # n − 1: the spread is measured around the sample's own mean
    return "\n".join(
        [
            f"episodes  {len(returns)}",
            f"return    {mean:.2f}  (95% interval {mean - half:.2f} to {mean + half:.2f})",
            f"          std {std:.2f}, min {min(returns):.2f}, max {max(returns):.2f}",
            f"length    {sum(lengths) / len(lengths):.1f}  (min {min(lengths)}, max {max(lengths)})",
        ]
    )
