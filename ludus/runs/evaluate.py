"""Evaluate policies in several processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ludus.containers.evaluate import Evaluation, Finished, summarize
from ludus.containers.threads import set_threads
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.parallel.pool import OnDone, ProcessPool
from ludus.parallel.process import WorkerError
from ludus.runs.policy import Player, load


class Task(NamedTuple):
    """A policy to evaluate, by the arguments of ``load``, and as it was loaded in this process."""

    run: Path
    checkpoint: str
    runs: str
    trust: bool
    player: Player


def evaluate_in_processes(
    tasks: Sequence[Task],
    episodes: int,
    seed: int,
    greedy: bool,
    workers: int,
    on_done: OnDone | None = None,
    on_warning: Callable[[str], object] = warnings.warn,
) -> list[Evaluation]:
    """Evaluate policies in ``workers`` processes, with the same result as ``Player.evaluate``.

    With fewer policies than workers, the environments of each are divided among several workers, unless they step as a
    batch (env.backend vector or tensor) or are games of self-play.
    """
    parts = [task.player.divide_rows(episodes, -(-workers // len(tasks))) for task in tasks]
    items: list[dict[str, Any]] = [
        {
            "run": str(task.run.resolve()),
            "checkpoint": task.checkpoint,
            "runs": task.runs,
            "trust": task.trust,
            "device": str(task.player.device),
            "threads": max(1, task.player.settings.threads // workers),
            "rows": rows,
            "episodes": episodes,
            "seed": seed,
            "greedy": greedy,
        }
        for task, divided in zip(tasks, parts, strict=True)
        for rows in divided
    ]
    if len(items) < workers:
        on_warning(
            f"{len(items)} of {workers} workers are used: the environments of a run cannot be divided further, and "
            "not at all if they step as a batch (env.backend vector or tensor) or are games of self-play"
        )
    with ProcessPool(min(workers, len(items)), preload=[__name__]) as pool:
        try:
            answers = iter(pool.map(play_part, items, on_done=on_done))
        except WorkerError as error:
            failed = UserError(f"The evaluation failed: {error.name} {error.what}.")
            failed.details = f"{error.details.lstrip()}\n"
            raise failed from error
    evaluations = []
    for task, divided in zip(tasks, parts, strict=True):
        own = [next(answers) for _ in divided]
        if any(answer["step"] != task.player.meta.get("step") for answer in own):
            raise UserError(
                f'The run "{task.run}" saved a new {task.checkpoint} policy while it was loaded: evaluate it again, or '
                "choose a step with --checkpoint."
            )
        evaluations.append(summarize(Finished(*episode) for answer in own for episode in answer["finished"]))
    return evaluations


def play_part(item: dict[str, Any]) -> dict[str, Any]:
    """Play the episodes of some rows, in a worker process."""
    player = load(item["run"], item["checkpoint"], item["runs"], item["device"], trust=item["trust"])
    set_threads(item["threads"])
    try:
        finished = player.play_rows(Rows(*item["rows"]), item["episodes"], item["seed"], item["greedy"])
    finally:
        player.close()
    return {"step": player.meta.get("step"), "finished": finished}
