"""Recorded episodes in one ``.npz`` file of plain arrays.

``observation`` and ``action`` (``observation/<name>`` and ``action/<name>`` of Dict spaces) and ``reward`` hold the
steps of all episodes in order; an episode of T steps has T + 1 observations. ``length``, ``terminated`` and
``truncated`` have one entry per episode.
"""

from __future__ import annotations

import itertools
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.dataset import Dataset, RecordedEpisode
from ludus.core.errors import UserError
from ludus.core.files import os_error_reason, temporary_name

Array = NDArray[Any]
KINDS = ("observation", "action")
REQUIRED = ("reward", "length", "terminated", "truncated")
ENDS = ("terminated", "truncated")
# what numpy and zipfile raise for files that are damaged, encrypted or compressed by a method they lack
DAMAGED = (
    *(ValueError, EOFError, KeyError, AttributeError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)


def save_npz(path: str | Path, episodes: Sequence[RecordedEpisode]) -> None:
    """Write episodes to a file."""
    arrays: dict[str, Array] = {}
    for kind in KINDS:
        parts = [getattr(episode, kind) for episode in episodes]
        for name in parts[0]:
            arrays[_key(kind, name)] = np.concatenate([part[name] for part in parts])
    arrays["reward"] = np.concatenate([episode.reward for episode in episodes])
    arrays["length"] = np.array([episode.length for episode in episodes], np.int64)
    arrays["terminated"] = np.array([episode.terminated for episode in episodes], np.bool_)
    arrays["truncated"] = np.array([episode.truncated for episode in episodes], np.bool_)
    try:
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f'"{path}" cannot be written ({os_error_reason(error)}); choose another file.') from error


def save_numbered(folder: Path, name: str, episodes: Sequence[RecordedEpisode]) -> Path:
    """Write episodes to ``name-N.npz`` in a folder, with the first number that is free; return the file."""
    written = folder / temporary_name(".npz")
    try:
        save_npz(written, episodes)
        for number in itertools.count(1):
            file = folder / f"{name}-{number}.npz"
            with suppress(FileExistsError):
                os.link(written, file)
                return file
    finally:
        written.unlink(missing_ok=True)
    raise AssertionError("count never ends")


def load_npz(path: str | Path) -> Dataset:
    """Read the episodes of a file; it holds arrays only, and nothing in it is run."""
    arrays = _read(path)
    missing = [name for name in REQUIRED if name not in arrays]
    missing += [kind for kind in KINDS if not any(_split(name)[0] == kind for name in arrays)]
    unknown = [name for name in arrays if name not in REQUIRED and _split(name)[0] not in KINDS]
    if missing or unknown:
        problem = f'lacks the array "{missing[0]}"' if missing else f'has an unknown array "{unknown[0]}"'
        raise UserError(f'The dataset "{path}" {problem}; docs/imitation.md has the arrays of such a file.')
    return Dataset(tuple(_episodes(arrays, path)), str(path))


def _read(path: str | Path) -> dict[str, Array]:
    if not Path(path).exists():
        raise UserError(f'data.path is "{path}", which does not exist; give an .npz file, a run or minari:ID.')
    if not Path(path).is_file():
        raise UserError(f'data.path is "{path}", which is not a regular file; give an .npz file, a run or minari:ID.')
    try:
        opened = np.load(path, allow_pickle=False)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        with opened as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise UserError(f'data.path is "{path}", which cannot be read ({os_error_reason(error)}).') from error
    except DAMAGED as error:
        reason = " ".join(str(error).split())[:120]
        if "allow_pickle" in reason and not zipfile.is_zipfile(path):  # numpy takes any other file for a pickle
            reason = "it is no zip file"
        raise UserError(f'data.path is "{path}", which is no .npz file of arrays ({reason}).') from error


def _episodes(arrays: Mapping[str, Array], path: str | Path) -> Iterator[RecordedEpisode]:
    lengths = arrays["length"]
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer) or (lengths < 0).any():
        raise UserError(f'The dataset "{path}" has a wrong array "length"; give the number of steps of each episode.')
    total = int(lengths.sum())
    for name, array in arrays.items():
        expected = total + len(lengths) * (_split(name)[0] == "observation")
        expected = len(lengths) if name in REQUIRED[1:] else expected
        if not array.ndim or len(array) != expected:
            found = len(array) if array.ndim else 0
            raise UserError(f'The dataset "{path}" has {found} rows in the array "{name}", but should have {expected}.')
    for name in ENDS:
        if arrays[name].ndim != 1 or not np.isin(arrays[name], (0, 1)).all():
            raise UserError(f'The dataset "{path}" has a wrong array "{name}"; give true or false for each episode.')
    ends = np.cumsum(lengths)
    for number, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        seen, done = slice(end - length + number, end + number + 1), slice(end - length, end)
        yield RecordedEpisode(
            observation=_select(arrays, "observation", seen),
            action=_select(arrays, "action", done),
            reward=arrays["reward"][done],
            terminated=bool(arrays["terminated"][number]),
            truncated=bool(arrays["truncated"][number]),
        )


def _select(arrays: Mapping[str, Array], kind: str, steps: slice) -> dict[str, Array]:
    return {_split(key)[1]: array[steps] for key, array in arrays.items() if _split(key)[0] == kind}


def _key(kind: str, name: str) -> str:
    return kind if name == kind else f"{kind}/{name}"


def _split(key: str) -> tuple[str, str]:
    """Return kind and name; a plain space has the name of its kind."""
    kind, _, name = key.partition("/")
    return kind, name or kind
