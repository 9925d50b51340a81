"""``summary.json``: a small file with the identity and progress of a run, for ``ludus list runs``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ludus.core import files
from ludus.core.errors import UserError
from ludus.runs.folder import RunDirectory, find_runs, is_locked, last_used, step_folders
from ludus.settings.config_file import read_config

FILE = "summary.json"
State = Literal["running", "complete", "stopped", "failed", "killed", "unknown"]
_LIMIT = 1 << 16  # bytes to read of a summary
_TAIL = 1 << 14  # bytes to read at the end of the metrics


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Identity and progress of a run."""

    environment: str
    agent: str
    seed: int
    name: str = ""
    tags: tuple[str, ...] = ()
    steps: int = 0
    nb_step: int = 0
    best: float | None = None  # the best mean return of an evaluation
    state: State = "unknown"
    reason: str = ""  # why it ended


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run on disk."""

    path: Path
    used: float  # time when training in it last began or ended, in seconds since 1970
    summary: Summary


def write_summary(run: RunDirectory, summary: Summary) -> None:
    """Write the summary atomically."""
    files.write_atomic(run.path / FILE, json.dumps(asdict(summary), indent=1).encode())


def list_runs(root: str | Path) -> Iterator[ListedRun]:
    """Yield the runs below ``root``, the most recently used last; unreadable ones are skipped."""
    for path in find_runs(Path(root)):
        if (summary := read_summary(path)) is not None:
            yield ListedRun(path=path, used=last_used(path) / 1e9, summary=summary)


def read_summary(run: Path) -> Summary | None:
    """Read a run's summary; a running run without a lock was killed."""
    summary = _parse(run) or _from_settings(run)
    if summary is None:
        return None
    if is_locked(run):
        summary = replace(summary, state="running")
    elif summary.state == "running":
        summary = replace(summary, state="killed")
    if summary.state in ("running", "killed"):
        summary = replace(summary, steps=max(summary.steps, _last_step(run / "metrics.jsonl")))
    return summary


def _parse(run: Path) -> Summary | None:
    """Read ``summary.json``; None if it is missing or malformed."""
    try:
        with files.open_regular_file(run / FILE) as file:
            found: Any = json.loads(file.read(_LIMIT))
        best = None if found["best"] is None else float(found["best"])
        return Summary(
            environment=str(found["environment"]),
            agent=str(found["agent"]),
            seed=int(found["seed"]),
            name=str(found["name"]),
            tags=tuple(map(str, found["tags"])),
            steps=int(found["steps"]),
            nb_step=int(found["nb_step"]),
            best=best if best is not None and math.isfinite(best) else None,
            state=found["state"] if found["state"] in get_args(State) else "unknown",
            reason=str(found["reason"]),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def _from_settings(run: Path) -> Summary | None:
    """Summarize a run without ``summary.json`` from its settings and checkpoint names."""
    try:
        found = read_config(run / "config.toml")
        steps = [int(path.name.removeprefix("step_")) for path in step_folders(run / "checkpoints")]
        name, tags = found.get("name", ""), found.get("tags", ())
        return Summary(
            environment=str(found["env.id"]),
            agent=str(found.get("agent.name", "")),
            seed=int(found.get("seed", 0)),
            name=name if isinstance(name, str) else "",
            tags=tuple(map(str, tags)) if isinstance(tags, tuple) else (),
            steps=max(steps, default=0),
        )
    except (UserError, OSError, ValueError, TypeError, KeyError):
        return None


def _last_step(metrics: Path) -> int:
    """Return the step of the last complete line of metrics, or 0."""
    with suppress(OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        with files.open_regular_file(metrics) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
            lines = file.read(_TAIL).split(b"\n")
        return int(json.loads(lines[-2])["step"])
    return 0
