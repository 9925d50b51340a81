"""Open and lock the folder of a run that is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ludus
from ludus.containers.build import bytes_of
from ludus.containers.local import LocalWorker
from ludus.core.config import Plan
from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.managers.history import MAX_BYTES, MAX_STEPS
from ludus.runs.checkpoint import Checkpoint, open_newest
from ludus.runs.folder import RunDirectory
from ludus.settings.config_file import read_origins
from ludus.settings.settings import Flat, Resolved, Settings, from_flat
from ludus.settings.trust import read_run_settings

# upper bounds in bytes for the size of a checkpoint: of a step beside observation and action, of an environment's
# snapshot, and of everything of fixed size
STEP, SNAPSHOT, FIXED = 256, 1 << 20, 1 << 26


class SavedRun(NamedTuple):
    """A run to resume."""

    run: RunDirectory
    resolved: Resolved
    checkpoint: Checkpoint | None  # None: it was killed before its first checkpoint, and starts again from step 0
    warnings: list[str]  # damaged checkpoints, or another version of Ludus
    signs: bool  # whether to sign its settings as this user's
    complete: str = ""  # why there is nothing left to do, and how to extend the run; empty if there is

    @property
    def state(self) -> State | None:
        """Return the state in the checkpoint, with meta tensors."""
        return None if self.checkpoint is None else self.checkpoint.outline


@contextmanager
def open_run(
    path: str | Path,
    runs: str,
    nb_step: int | None = None,
    stop_at: float | None = None,
    device: str | None = None,
    trust: bool = False,
    unused: tuple[str, ...] = (),
    given: Flat | None = None,
    locks: bool = True,
) -> Iterator[SavedRun]:
    """Open the settings and the newest intact checkpoint of a run; refuse a run with deleted checkpoints.

    ``given`` settings override those of the run, and ``unused`` ones are not imported. ``locks``: as the only writer.
    """
    run = RunDirectory.open(path, runs)
    with run.lock() if locks else nullcontext():
        trusted = read_run_settings(run.path, run.config, trust, unused, writes=True)
        flags = {"nb_step": nb_step, "device": device, "evaluation.stop_at": stop_at}
        overrides = dict(given or {}) | {key: value for key, value in flags.items() if value is not None}
        settings = from_flat(trusted.flat | overrides)
        settings.validate()
        origins = read_origins(run.config) | dict.fromkeys(overrides, "flag of resume")
        with open_saved(run, Resolved(settings, origins), trusted.may_sign) as saved:
            yield saved


@contextmanager
def open_saved(run: RunDirectory, resolved: Resolved, signs: bool) -> Iterator[SavedRun]:
    """Open the newest intact checkpoint of a run with these settings."""
    settings, warnings = resolved.settings, list[str]()
    if run.latest_checkpoint() is None:  # killed before its first checkpoint, or these were deleted
        if run.saved_once.exists():
            new = f"`ludus train {settings.env.id} --init-from {run.path}`"
            fix = f", or start a new run from its best policy with {new}" if run.best_checkpoint() else ""
            raise UserError(
                f'The checkpoints of the run "{run.path}" were deleted, so it cannot be resumed: restore them{fix}.'
            )
        yield SavedRun(run, resolved, None, warnings, signs)
        return
    with open_newest(run, warnings.append) as checkpoint:
        if checkpoint.version != ludus.__version__:
            warnings.append(
                f"The checkpoint was written by Ludus {checkpoint.version}, and this is Ludus {ludus.__version__}: "
                "results may differ from those of an uninterrupted run."
            )
        complete = _why_complete(run, settings, checkpoint.outline)
        yield SavedRun(run, resolved, checkpoint, warnings, signs, complete)


def _are_counters(counters: State) -> bool:
    """Whether the counters in a checkpoint are plausible."""
    returns, lengths, *infos = counters["evaluation"] or ([], [])
    numbers = [*returns, *lengths, *(x for means in infos for x in dict(means).values())]
    return (
        all(type(counters[name]) is int and 0 <= counters[name] < 2**62 for name in ("step", "updates"))
        and type(counters["evaluated_at"]) is int
        and (counters["best"] is None or isinstance(counters["best"], int | float))
        and len(returns) == len(lengths)
        and len(infos) <= 1  # none in older checkpoints
        and all(type(x) in (int, float) for x in numbers)
    )


def _why_complete(run: RunDirectory, settings: Settings[Any], state: State) -> str:
    """Return why a run is complete and how to extend it, or an empty string if it is not."""
    try:
        counters = state["counters"]
        step, last = counters["step"], counters["evaluation"]
        evaluated = bool(counters["evaluated_at"] == step)  # else it was killed before the last evaluation
        mean = None if last is None else sum(last[0]) / len(last[0])
        if not _are_counters(counters) or not isinstance(state["metrics"], dict):
            raise ValueError("wrong kinds of numbers")
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, OverflowError) as error:
        raise UserError(
            f'The newest checkpoint of "{run.path}" does not hold the state of a run: use another checkpoint, or copy '
            "the run again from its source."
        ) from error
    target = settings.evaluation.stop_at
    if not evaluated:
        return ""
    if step >= settings.nb_step:
        return (
            f"it has done {step:,} steps and nb_step is {settings.nb_step:,}; to train further, resume it with "
            f"--nb-step above {step:,}"
        )
    if target is not None and mean is not None and mean >= target:
        return f"its evaluation reached {target:g}; to train further, resume it with a higher --stop-at"
    return ""


def max_checkpoint_bytes(worker: LocalWorker) -> int:
    """Return an upper bound of the size of a worker's checkpoint, for the environments of Ludus and Gymnasium."""
    stored = 0
    for learner in worker.learners:
        needs, rows = worker.manager.roles[learner.role], learner.settings.rows
        action, observation = (
            sum(spec.size * np.dtype(spec.dtype).itemsize for spec in specs.values())
            for specs in (needs.action, needs.observation)
        )
        plan: Plan = learner.settings.agent.plan(rows)
        experience = learner.cache.max_bytes + rows * (observation + action + STEP) * (plan.rollout + 2)
        actions = min(MAX_BYTES, MAX_STEPS * rows * action)
        stored += 2 * (experience + actions) + rows * SNAPSHOT
    return worker.settings.ranks * (8 * bytes_of(worker.agent) + stored + FIXED)
