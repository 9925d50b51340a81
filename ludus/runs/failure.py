"""Write what a failed update leaves behind, for ``ludus diagnose``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ludus.containers.guard import TrainingFailed
from ludus.containers.local import LocalWorker
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.runs import checkpoint as checkpoints

FOLDER = "failure"  # within a run


def save_failure(run: Path, worker: LocalWorker, error: TrainingFailed) -> UserError:
    """Save the live state and the batch in the run's folder; return the error with the command that reads them."""
    failure, agent = error.failure, worker.agent
    refused = failure.refused
    state: State = {
        "agent": dict(agent.state_dict()),
        "buffers": dict(agent.named_buffers()),  # also those that no state dict holds
        "updater": worker.updater.state_dict(),
        "specs": {name: _plain(getattr(worker.manager, name)) for name in ("observation", "action")},
        "wrong": failure.wrong,
        "metrics": failure.metrics,
        "batch": _batch_state(failure.batch),
        "step": None,
    }
    if refused is not None:
        own = getattr(refused.loss, "__self__", None) is agent  # else no name finds the loss again
        state["step"] = {
            "loss": getattr(refused.loss, "__name__", "") if own else "",
            "group": refused.group,
            "batch": _batch_state(refused.batch),
        }
    try:
        checkpoints.save(run / FOLDER, state, {"step": failure.step})
    except UserError as problem:  # a full disk, say: what ended the run matters more
        return UserError(f"{error} What led to it could not be saved: {problem}")
    return UserError(f"{error} `ludus diagnose {shlex.quote(str(run))}` shows how it came about.")


def _batch_state(batch: Batch) -> State:
    return {field.name: getattr(batch, field.name) for field in fields(batch)}


def _plain(specs: Mapping[str, Any]) -> State:
    return {name: asdict(spec) for name, spec in specs.items()}
