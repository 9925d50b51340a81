"""Metrics of a run in ``metrics.jsonl``, and as TensorBoard files beside it.

Each line is one flat JSON object: ``step``, ``time`` (seconds since 1970) and the values by name. JSON has no NaN or
Inf, so they are written as strings; ``read_metrics`` returns numbers.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from ludus.core.errors import UserError
from ludus.core.files import append, open_append, open_regular_file, os_error_reason, write_error
from ludus.core.types import State
from ludus.logging.tensorboard import EventFile

_MAX_LINE = 1 << 20  # bytes
_MAX_FILE = 1 << 32  # bytes


class Metrics:
    """Appends one line per write to ``metrics.jsonl``, unbuffered, and writes TensorBoard files."""

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self._file = open_append(path)
        self._board = None if tensorboard is None else EventFile(tensorboard)
        self._step = 0
        self._truncate(self._end())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; values may be numbers or 0-dimensional tensors."""
        if reserved := {"step", "time"} & values.keys():
            raise ValueError(f"{sorted(reserved)[0]!r} is reserved, so no metric can have that name")
        now = time.time()
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: x if math.isfinite(x) else str(x) for name, x in numbers.items()}
        line = {"step": step, "time": round(now, 3)} | finite
        append(self._file, json.dumps(line, allow_nan=False).encode() + b"\n")
        self._step = step
        if self._board is not None:
            self._board.write(step, now, numbers)

    def state_dict(self) -> State:
        """Return the length of the file, which is flushed to disk first."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(self._file.name, error) from error
        return {"offset": self._end(), "step": self._step}

    def load_state_dict(self, state: State) -> None:
        """Remove the lines after the checkpoint, and hide them in TensorBoard."""
        offset, step = (state.get(name) for name in ("offset", "step"))
        if type(offset) is not int or type(step) is not int or min(offset, step) < 0:
            raise UserError(
                f'The checkpoint does not hold the length of "{self._file.name}": use another checkpoint of this run.'
            )
        self._truncate(offset)
        self._step = step
        if self._board is not None:
            self._board.purge_after(self._step)

    def close(self) -> None:
        """Close the files; may be called twice."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _end(self) -> int:
        return self._file.seek(0, os.SEEK_END)

    def _truncate(self, offset: int) -> None:
        """Truncate the file to the complete lines before ``offset``."""
        stop = min(offset, self._end())
        start = max(stop - _MAX_LINE, 0)
        self._file.seek(start)
        whole = start + self._file.read(stop - start).rfind(b"\n") + 1
        if whole == start > 0:
            raise UserError(f'"{self._file.name}" is not a file of metrics: move it away.')
        if whole < self._end():
            self._file.truncate(whole)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return all complete lines of a ``metrics.jsonl``."""
    try:
        with open_regular_file(path) as file:
            if os.fstat(file.fileno()).st_size > _MAX_FILE:
                raise UserError(f'The metrics "{path}" are too large: move them away.')
            *lines, _ = file.readall().split(b"\n")
    except OSError as error:
        raise UserError(
            f'The metrics "{path}" cannot be read ({os_error_reason(error)}): is this a run folder?'
        ) from error
    return [_parse(line, path, number) for number, line in enumerate(lines, 1)]


def _parse(line: bytes, path: Path, number: int) -> dict[str, float]:
    try:
        values = {name: float(x) if isinstance(x, str) else x for name, x in json.loads(line.decode()).items()}
        numbers = [type(x) is float or (type(x) is int and abs(x) < 2**63) for x in values.values()]
        if type(values["step"]) is not int or not all(numbers):
            raise ValueError("not numbers")
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f'Line {number} of "{path}" is not a line of metrics: remove it.') from error
    return values
