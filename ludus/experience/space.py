"""How much room a replay takes, and whether there is so much."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec, Specs
from ludus.experience.config import ReplayConfig
from ludus.experience.frames import frames_kept
from ludus.parallel.resources import free_memory

ACCOUNT = 8 + 1 + 8  # bytes a step beside what was seen and said: rewards and endings, beginnings, the queue


def bytes_needed(
    config: ReplayConfig,
    batch: int,
    observation: Specs,
    action: Specs | None = None,
    state: HiddenState | None = None,
) -> int:
    """Bytes that a full replay takes; ``state`` is the hidden state of any number of rows."""
    length = config.replay // batch
    span = config.burn_in + config.sequence if config.sequence else config.n_step
    said = sum(_bytes(spec) for spec in (action or {}).values())
    a_step = ACCOUNT + said + 16 * config.prioritized + 8 * (config.hindsight > 0)
    seen = 0
    for spec in observation.values():
        if spec.stack > 1:
            seen += frames_kept(spec, length, span) * _bytes(spec) // spec.stack + 8 * length
        else:
            seen += length * _bytes(spec)
    kept = sum(x.nbytes // len(x) for x in (state or {}).values())  # at the starts of sequences
    starts = length // (config.sequence - config.overlap) + 2 if config.sequence else 0
    return batch * (length * a_step + seen + starts * kept)


def free_room(device: torch.device, folder: str) -> int:
    """Bytes that are to be had where a replay would lie: in files of ``folder``, or in the device's memory."""
    if folder:
        place = Path(folder).absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()


def refuse_if_too_large(needed: int, free: int, folder: str, device: str = "cpu", why: str = "") -> None:
    """Refuse a replay that does not fit; ``why`` begins the sentence."""
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


def rollout_bytes(length: int, batch: int, observation: Specs, copies: int, normalized: int) -> int:
    """Bytes that learning from a rollout takes for its observations, at least.

    ``copies`` of it are held at once, and ``normalized`` more in floats of those that a normalizer takes in.
    """
    rows = (length + 1) * batch
    floats = sum(spec.size * 4 for spec in observation.values() if spec.dtype.startswith("float"))
    return rows * (copies * sum(_bytes(spec) for spec in observation.values()) + normalized * floats)


def refuse_too_short(config: ReplayConfig, batch: int, device: torch.device) -> None:
    """Refuse a replay that would never hold what one update needs, and files for a device that is not the CPU."""
    length = config.replay // batch
    if config.sequence:
        span, stride = config.burn_in + config.sequence, config.sequence - config.overlap
        shortest, what = span + stride, f"sequences of {span} steps"
        items = max(length - span, 0) // stride * batch
    else:
        shortest, what = config.n_step + 2, f"agent.n_step {config.n_step}"
        items = max(length - config.n_step, 0) * batch
    told = f"agent.replay is {config.replay}: {length} steps of each of {batch} environments"
    if length < shortest:
        raise UserError(f"{told}, too few for {what}; raise it to {shortest * batch} or more.")
    if items < config.batch_size:
        raise UserError(f"{told}, so never {config.batch_size} (agent.batch_size) to draw; raise it, or lower that.")
    if config.replay_folder and device.type != "cpu":
        raise UserError(
            f'agent.replay_folder is "{config.replay_folder}", but the run is on {device}; set device to cpu, or leave '
            "the folder out."
        )


def _bytes(spec: Spec) -> int:
    return spec.size * np.dtype(spec.dtype).itemsize
