"""The folder of a run as training holds it: a new one, or one to go on with; locked, so that nobody else writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ludus.containers.settings import Resolved, Settings, from_flat
from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.track.checkpoint import load_newest
from ludus.track.config_file import read_config, read_origins
from ludus.track.rundir import RunDirectory


class SavedRun(NamedTuple):
    """A run to go on with."""

    run: RunDirectory
    resolved: Resolved
    state: State | None  # None: it was killed before its first checkpoint, and begins anew
    warnings: list[str]  # checkpoints that were passed over


@contextmanager
def new_run(settings: Settings[Any]) -> Iterator[RunDirectory]:
    """Make the folder of a new run."""
    run = RunDirectory.create(settings.runs, settings.env.id, settings.agent_name)
    with run.lock():
        yield run


@contextmanager
def open_run(
    path: str | Path, runs: str, nb_step: int | None = None, stop_at: float | None = None, device: str | None = None
) -> Iterator[SavedRun]:
    """Read settings and newest whole checkpoint of a run; refuse one that has reached its end."""
    run = RunDirectory.open(path, runs)
    with run.lock():
        settings, origins = from_flat(read_config(run.config)), read_origins(run.config)
        if nb_step is not None:
            settings, origins["nb_step"] = replace(settings, nb_step=nb_step), "flag of resume"
        if device is not None:
            settings, origins["device"] = replace(settings, device=device), "flag of resume"
        if stop_at is not None:
            evaluation = replace(settings.evaluation, stop_at=stop_at)
            settings, origins["evaluation.stop_at"] = replace(settings, evaluation=evaluation), "flag of resume"
        settings.validate()
        warnings: list[str] = []
        state = load_newest(run, warnings.append)[0] if run.latest_checkpoint() is not None else None
        if state is not None:
            _refuse_ended(run, settings, state, nb_step)
        yield SavedRun(run, Resolved(settings, origins), state, warnings)


def _refuse_ended(run: RunDirectory, settings: Settings[Any], state: State, nb_step: int | None) -> None:
    try:
        counters = state["counters"]
        step, last = int(counters["step"]), counters["evaluation"]
        evaluated = bool(counters["evaluated_at"] == step)  # else it was killed before its last evaluation
        mean = None if last is None else sum(last[0]) / len(last[0])
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise UserError(f'The newest checkpoint of "{run.path}" does not hold the state of a run.') from error
    target = settings.evaluation.stop_at
    if step >= settings.nb_step and (evaluated or step > (nb_step or step)):
        raise UserError(
            f'The run "{run.path}" is complete: it has done {step:,} steps, and nb_step, the total, is '
            f"{settings.nb_step:,}; go on with an --nb-step larger than {step:,}."
        )
    if target is not None and mean is not None and mean >= target and evaluated:
        raise UserError(
            f'The run "{run.path}" is complete: its evaluation reached {target:g}; go on with a higher --stop-at.'
        )
