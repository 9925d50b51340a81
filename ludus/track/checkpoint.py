"""Checkpoints: folders that are either whole or not there, and whose every byte is checked before it is used.

``manifest.json`` (schema, versions, meta, size and SHA-256 of each file, and a digest of itself),
``tensors.safetensors`` and ``state.json``. Nothing pickled is written or read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
from torch import Tensor

import ludus
from ludus.core.errors import UserError
from ludus.core.types import State, Tensors
from ludus.track.encoding import decode, encode
from ludus.track.rundir import ASIDE, RunDirectory, settled, step_folders

T = TypeVar("T")
SCHEMA = 1
MANIFEST, TENSORS, STATE = "manifest.json", "tensors.safetensors", "state.json"
_TEMPORARY = ".tmp-"  # no reader looks at such a name; the next save removes it
_MANIFEST_LIMIT = 1 << 24
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError, safetensors.SafetensorError)


def save(folder: Path, state: State, meta: Mapping[str, Any]) -> None:
    """Write a checkpoint in one piece: killed at any instant, the old one or the new one can be loaded."""
    tensors: Tensors = {}
    tree, meta_tree = encode(state, tensors), encode(dict(meta), {})
    files = {TENSORS: safetensors.torch.save(_separate(tensors)), STATE: json.dumps(tree, allow_nan=False).encode()}
    temporary = folder.with_name(f"{_TEMPORARY}{folder.name}-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clean(folder.parent)
        temporary.mkdir()
        for name, data in {**files, MANIFEST: _manifest(files, meta_tree)}.items():
            _write(temporary / name, data)
        _sync(temporary)
        _place(temporary, folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f'The checkpoint "{folder}" cannot be written ({error.strerror}): free some space or give another place.'
        ) from error


def load(folder: Path) -> tuple[State, dict[str, Any]]:
    """Return state and meta of a checkpoint, on the CPU; whatever is wrong with it is a UserError."""
    return _settle(folder, _load)


def read_meta(folder: Path) -> dict[str, Any]:
    """The meta of a checkpoint, without its tensors."""
    return _settle(folder, lambda folder: _read_manifest(_existing(folder))[1])


class CheckpointKeeper:
    """Keeps the last ``keep`` checkpoints of a run and its best one."""

    def __init__(self, run: RunDirectory, keep: int = 3) -> None:
        if keep < 1:
            raise UserError(f"The number of checkpoints to keep is {keep}: give 1 or more.")
        self._run, self._keep = run, keep

    def save(self, step: int, state: State, meta: Mapping[str, Any] | None = None) -> Path:
        """Write ``checkpoints/step_<step>/`` and remove what is too old, or later than a run that was resumed."""
        folder = self._run.checkpoints / f"step_{step}"
        save(folder, state, {"step": step, **(meta or {})})
        folders = step_folders(self._run.checkpoints)
        here = folders.index(folder)
        for other in folders[: max(here + 1 - self._keep, 0)] + folders[here + 1 :]:
            _remove(other)
        return folder

    def save_best(self, step: int, state: State, score: float, meta: Mapping[str, Any] | None = None) -> Path:
        """Write ``best/``, in place of the one before."""
        save(self._run.best, state, {"step": step, "score": score, **(meta or {})})
        return self._run.best

    def latest(self) -> Path | None:
        """The checkpoint of the highest step."""
        return self._run.latest_checkpoint()


def load_latest(run: RunDirectory) -> tuple[State, dict[str, Any]]:
    """Load the checkpoint of the highest step of a run."""
    folder = run.latest_checkpoint()
    if folder is None:
        raise UserError(f'The run "{run.path}" has no checkpoint yet: let it train until its first save.')
    return load(folder)


def _settle(folder: Path, read: Callable[[Path], T]) -> T:
    """Read again where what failed is that a running training replaced the checkpoint meanwhile."""
    while True:
        before = _identity(folder)
        try:
            return read(folder)
        except UserError:
            if _identity(folder) == before:
                raise


def _load(folder: Path) -> tuple[State, dict[str, Any]]:
    folder = _existing(folder)
    entries, meta = _read_manifest(folder)
    data = {name: _read_entry(folder / name, entry) for name, entry in entries.items()}
    try:
        tensors = safetensors.torch.load(data[TENSORS])
        state = decode(json.loads(data[STATE]), tensors)
        if not isinstance(state, dict):
            raise TypeError("not a dict")
    except _MALFORMED as error:
        raise _damaged(folder / STATE, "does not hold a state") from error
    return state, meta


def _read_manifest(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the entries of the files, and the meta."""
    path = folder / MANIFEST
    data = _read(path, _MANIFEST_LIMIT)
    try:
        body = json.loads(data)
        schema = body["schema"]
        if schema != SCHEMA:
            raise UserError(
                f'The checkpoint "{folder}" has schema {str(schema)[:20]}, and Ludus {ludus.__version__} reads schema '
                f"{SCHEMA}: use the Ludus that wrote it, {str(body.get('library', 'of another version'))[:20]}."
            )
        digest = body.pop("sha256")
        entries, meta = body["files"], decode(body["meta"], {})
        _check_entries(folder, entries)
        intact = digest == hashlib.sha256(_dump(body)).hexdigest() and isinstance(meta, dict)
    except _MALFORMED as error:
        raise _damaged(path, "is not the manifest of a checkpoint") from error
    if not intact:
        raise _damaged(path, "was edited after it was written")
    return entries, meta


def _check_entries(folder: Path, entries: dict[str, Any]) -> None:
    for name, entry in entries.items():
        if not _FILE_NAME.fullmatch(name):
            raise _damaged(folder / MANIFEST, f"names {name[:100]!r}, which is not a plain file name")
        if not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str):
            raise TypeError("not the size and hash of a file")
    if not {TENSORS, STATE} <= entries.keys():
        raise _damaged(folder / MANIFEST, f"does not name {TENSORS} and {STATE}")


def _read_entry(path: Path, entry: Mapping[str, Any]) -> bytes:
    size = entry["bytes"]
    data = _read(path, size)
    if len(data) != size:
        raise _damaged(path, f"is cut short: it has {len(data)} bytes of {size}")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise _damaged(path, "was edited after it was written")
    return data


def _read(path: Path, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes; never through a link, never from a device or a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _damaged(path, "is not a plain file")
            if status.st_size > limit:
                raise _damaged(path, f"has {status.st_size} bytes where {limit} are expected")
            return file.read()
    except OSError as error:
        what = "is a link" if path.is_symlink() else f"cannot be read ({error.strerror})"
        raise _damaged(path, what) from error


def _existing(folder: Path) -> Path:
    found = settled(folder)
    if found is None:
        raise UserError(f'There is no checkpoint "{folder}": give a folder that holds a {MANIFEST}.')
    if found.is_symlink():
        raise UserError(f'The checkpoint "{folder}" is a link: give the folder that it points to.')
    return found


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f'The file "{path}" {what}, so this checkpoint cannot be used: '
        f'delete "{path.parent.name}" and take another checkpoint, or copy it again from its source.'
    )


def _manifest(files: Mapping[str, bytes], meta: Any) -> bytes:
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "library": ludus.__version__,
        "meta": meta,
        "files": {n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()},
    }
    return _dump({**body, "sha256": hashlib.sha256(_dump(body)).hexdigest()})


def _dump(tree: Any) -> bytes:
    return json.dumps(tree, allow_nan=False, indent=1).encode()


def _separate(tensors: Tensors) -> Tensors:
    """Give each tensor contiguous memory of its own: safetensors writes no others."""
    seen: set[int] = set()

    def own(x: Tensor) -> Tensor:
        shared = x.untyped_storage().data_ptr() in seen
        x = x.clone().contiguous() if shared else x.contiguous()
        seen.add(x.untyped_storage().data_ptr())
        return x

    return {name: own(x) for name, x in tensors.items()}


def _place(temporary: Path, folder: Path) -> None:
    aside = folder.with_name(ASIDE + folder.name)
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
    os.rename(temporary, folder)
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that no half of it is ever seen."""
    doomed = folder.with_name(f"{_TEMPORARY}{folder.name}-{os.getpid()}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _clean(parent: Path) -> None:
    """Remove what a killed writer left."""
    for path in parent.glob(_TEMPORARY + "*"):
        shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
