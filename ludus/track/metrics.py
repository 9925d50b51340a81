"""Metrics of a run: ``metrics.jsonl`` is the truth, TensorBoard renders it.

A line is one flat, strict JSON object: ``step``, ``time`` (seconds since 1970) and the values by name. JSON has no nan
and no infinities: the file has the strings ``"nan"``, ``"inf"`` and ``"-inf"``, ``read_metrics`` gives numbers again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus.core.errors import UserError
from ludus.core.types import State


class Metrics:
    """Appends one line per write to ``metrics.jsonl``, without a buffer, and renders to TensorBoard beside it."""

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self._file = path.open("ab", buffering=0)
        self._board = None if tensorboard is None else _Board(tensorboard)
        self._step = 0
        self._cut(self._file.tell())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; numbers of any kind are taken, 0-dimensional tensors too."""
        if reserved := {"step", "time"} & values.keys():
            raise ValueError(f"{sorted(reserved)[0]!r} is a column of its own, so no metric can have that name")
        now = time.time()
        numbers = {name: float(value) for name, value in values.items()}
        line = {"step": step, "time": round(now, 3)} | {n: _strict(x) for n, x in numbers.items()}
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._step = step
        if self._board is not None:
            self._board.write(step, now, numbers)

    def state_dict(self) -> State:
        """Where the file ends, so that a resume can cut it there."""
        return {"offset": self._file.tell(), "step": self._step}

    def load_state_dict(self, state: State) -> None:
        """Cut off what was written after the checkpoint, and let TensorBoard forget it too."""
        self._cut(state["offset"])
        self._step = state["step"]
        if self._board is not None:
            self._board.forget_after(self._step)

    def close(self) -> None:
        """Write out what TensorBoard has not written yet; may be called twice."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _cut(self, offset: int) -> None:
        """Cut the file at ``offset``, or before it where a killed writer or an editor left no whole line there."""
        with open(self._file.name, "rb") as file:
            whole = file.read(offset).rfind(b"\n") + 1
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)


class _Board:
    """Writes scalars for TensorBoard; imports it at the first write, as that takes 0.2 s."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._forget: int | None = None

    def write(self, step: int, now: float, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]
        self._open(now).add_event(Event(wall_time=now, step=step, summary=Summary(value=scalars)))

    def forget_after(self, step: int) -> None:
        self._forget = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, now: float) -> Any:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._folder), max_queue_size=1000, flush_secs=10)
        if self._forget is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=now, step=self._forget, session_log=start))
            self._forget = None
        return self._writer


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All whole lines of a ``metrics.jsonl``; a last line that was cut short is left out."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f'The metrics "{path}" cannot be read ({error.strerror}): is this a run folder?') from error
    return [_parse(line, path, number) for number, line in enumerate(lines, 1)]


def _parse(line: bytes, path: Path, number: int) -> dict[str, float]:
    try:
        return {name: float(x) if isinstance(x, str) else x for name, x in json.loads(line).items()}
    except (ValueError, AttributeError) as error:
        raise UserError(f'Line {number} of "{path}" is not a line of metrics: remove it.') from error


def _strict(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)
