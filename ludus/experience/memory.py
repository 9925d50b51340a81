"""How much memory replays and rollouts need, and how much is free."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec, Specs
from ludus.experience.config import ReplayConfig
from ludus.experience.frames import frames_needed
from ludus.parallel.resources import free_memory

STEP_BYTES = 8 + 1 + 8  # per step beside observations and actions: reward and flags, whether it can be drawn, the queue


def replay_bytes(
    config: ReplayConfig,
    batch: int,
    observation: Specs,
    action: Specs | None = None,
    state: HiddenState | None = None,
) -> int:
    """Return the bytes of a full replay; ``state`` is the hidden state of any number of rows."""
    length = config.replay // batch
    actions = sum(spec_bytes(spec) for spec in (action or {}).values())
    per_step = STEP_BYTES + actions + 16 * config.prioritized + 8 * (config.hindsight > 0)
    observations = 0
    for spec in observation.values():
        if spec.stack > 1:
            observations += frames_needed(spec, length, config.span) * spec_bytes(spec) // spec.stack + 8 * length
        else:
            observations += length * spec_bytes(spec)
    per_start = sum(x.nbytes // len(x) for x in (state or {}).values())  # hidden state where a sequence starts
    starts = length // config.stride + 2 if config.sequence else 0
    return batch * (length * per_step + observations + starts * per_start)


def rollout_bytes(length: int, batch: int, observation: Specs, copies: int, normalized: int) -> int:
    """Return the bytes that the observations of a rollout need while learning from it.

    ``copies`` of them exist at once, and ``normalized`` more of those that are normalized, as float32.
    """
    rows = (length + 1) * batch
    floats = sum(spec.size * 4 for spec in observation.values() if spec.dtype.startswith("float"))
    return rows * (copies * sum(spec_bytes(spec) for spec in observation.values()) + normalized * floats)


def spec_bytes(spec: Spec) -> int:
    """Return the bytes of one value."""
    return spec.size * np.dtype(spec.dtype).itemsize


def free_bytes(device: torch.device, folder: str) -> int:
    """Return the free bytes on the disk of ``folder``, if given, else in the device's memory."""
    if folder:
        path = Path(folder).absolute()
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free
    if device.type != "cuda":
        return free_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for new tensors
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def check_fits(what: str, needed: int, free: int, fix: str) -> None:
    """Refuse what does not fit in memory; ``what`` begins the sentence, as in "The networks need"."""
    if needed > free:
        raise UserError(f"{what} {needed / 1e9:,.2f} GB of memory, of which {free / 1e9:,.2f} GB are free; {fix}.")


def check_memory(needed: int, free: int, folder: str, device: str = "cpu", why: str = "") -> None:
    """Refuse a replay that does not fit; ``why`` begins the message."""
    if needed <= free:
        return
    where = f'in the folder "{folder}"' if folder else "in memory"
    other = "choose another folder" if folder else "set agent.replay_folder to keep it in files"
    if device != "cpu":
        other = "set device to cpu"
    raise UserError(
        f"{why}agent.replay needs {needed / 1e9:,.2f} GB {where}, where {free / 1e9:,.2f} GB are free; lower "
        f"agent.replay, or {other}."
    )
