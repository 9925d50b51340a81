"""Open the folder of a new or resumed run and lock it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ludus
from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.runs.checkpoint import Checkpoint, opened_newest
from ludus.runs.folder import RunDirectory
from ludus.settings.config_file import read_origins
from ludus.settings.settings import Flat, Resolved, Settings, from_flat
from ludus.settings.trust import read_run_settings


class SavedRun(NamedTuple):
    """A run to resume."""

    run: RunDirectory
    resolved: Resolved
    checkpoint: Checkpoint | None  # None: it was killed before its first checkpoint, and begins anew
    warnings: list[str]  # checkpoints that were passed over, and another version of Ludus
    signs: bool  # whether its settings may be written with this user's signature
    own: bool  # whether its settings name code of a user's own
    complete: str = ""  # why nothing is left to do

    @property
    def state(self) -> State | None:
        """The state in the checkpoint, with meta tensors."""
        return None if self.checkpoint is None else self.checkpoint.outline


@contextmanager
def new_run(settings: Settings[Any]) -> Iterator[RunDirectory]:
    """Make the folder of a new run."""
    run = RunDirectory.create(settings.runs, settings.env.id, settings.agent_name, settings.name)
    with run.lock():
        yield run


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
) -> Iterator[SavedRun]:
    """Read settings and newest whole checkpoint of a run; refuse one whose checkpoints were removed.

    ``given`` settings stand in place of the run's own.
    """
    run = RunDirectory.open(path, runs)
    with run.lock():
        trusted = read_run_settings(run.path, run.config, trust, unused, writes=True)
        settings, origins = from_flat(trusted.flat | (given or {})), read_origins(run.config)
        origins |= dict.fromkeys(given or {}, "flag of resume")
        if nb_step is not None:
            settings, origins["nb_step"] = replace(settings, nb_step=nb_step), "flag of resume"
        if device is not None:
            settings, origins["device"] = replace(settings, device=device), "flag of resume"
        if stop_at is not None:
            evaluation = replace(settings.evaluation, stop_at=stop_at)
            settings, origins["evaluation.stop_at"] = replace(settings, evaluation=evaluation), "flag of resume"
        settings.validate()
        warnings, own = list[str](), trusted.has_user_code or bool(given)
        resolved = Resolved(settings, origins)
        if run.latest_checkpoint() is None:
            _refuse_removed(run, settings)
            yield SavedRun(run, resolved, None, warnings, trusted.may_sign, own)
            return
        with opened_newest(run, warnings.append) as checkpoint:
            if checkpoint.version != ludus.__version__:
                warnings.append(
                    f"The checkpoint was written by Ludus {checkpoint.version}, and this is Ludus {ludus.__version__}: "
                    "numbers may differ from those of a run that was never stopped."
                )
            complete = _why_complete(run, settings, checkpoint.outline)
            yield SavedRun(run, resolved, checkpoint, warnings, trusted.may_sign, own, complete)


def _refuse_removed(run: RunDirectory, settings: Settings[Any]) -> None:
    """Refuse a run that has saved checkpoints and has none now; one killed before its first begins anew."""
    if not run.saved_once.exists():
        return
    fix = "bring them back"
    if run.best_checkpoint() is not None:
        fix += f", or begin a new run from its best policy with `ludus train {settings.env.id} --init-from {run.path}`"
    raise UserError(f'The checkpoints of the run "{run.path}" were removed, so it cannot be resumed; {fix}.')


def _are_counters(counters: State) -> bool:
    """Whether the counters in a checkpoint are plausible."""
    numbers = [*(counters["evaluation"] or [[], []])]
    return (
        all(type(counters[name]) is int and 0 <= counters[name] < 2**62 for name in ("step", "updates"))
        and type(counters["evaluated_at"]) is int
        and (counters["best"] is None or isinstance(counters["best"], int | float))
        and len(numbers) == 2
        and len(numbers[0]) == len(numbers[1])
        and all(type(x) in (int, float) for x in (*numbers[0], *numbers[1]))
    )


def _why_complete(run: RunDirectory, settings: Settings[Any], state: State) -> str:
    """Why a run is complete, and how to extend it; empty where it is not."""
    try:
        counters = state["counters"]
        step, last = counters["step"], counters["evaluation"]
        evaluated = bool(counters["evaluated_at"] == step)  # else it was killed before its last evaluation
        mean = None if last is None else sum(last[0]) / len(last[0])
        if not _are_counters(counters) or not isinstance(state["metrics"], dict):
            raise ValueError("wrong kinds of numbers")
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, OverflowError) as error:
        raise UserError(
            f'The newest checkpoint of "{run.path}" does not hold the state of a run: take another checkpoint, or copy '
            "the run again from its source."
        ) from error
    target = settings.evaluation.stop_at
    if not evaluated:
        return ""
    if step >= settings.nb_step:
        return (
            f"it has done {step:,} steps, and nb_step, the total, is {settings.nb_step:,}; --nb-step with more than "
            f"{step:,} goes on with it"
        )
    if target is not None and mean is not None and mean >= target:
        return f"its evaluation reached {target:g}; a higher --stop-at goes on with it"
    return ""
