"""Checkpoints: folders that are written atomically and verified by SHA-256 before they are used.

A checkpoint holds ``tensors.safetensors``, ``state.json`` and ``manifest.json`` (schema, version, meta data, size and
SHA-256 of the other two files, and a digest of itself). Nothing is pickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import ludus
from ludus.core.encoding import TensorFile, decode, encode, serialize, tensor_names
from ludus.core.errors import UserError
from ludus.core.files import (
    TEMPORARY,
    delete,
    exists,
    open_folder,
    open_regular_file,
    os_error_reason,
    sync,
    temporary_name,
    write_all,
    write_atomic,
    write_error,
)
from ludus.core.types import State, Tensors
from ludus.parallel.resources import free_memory
from ludus.runs.folder import REPLACED, RunDirectory, current_path, step_folders

SCHEMA = 4
MANIFEST_LIMIT, STATE_LIMIT = 1 << 24, 1 << 26  # bytes of JSON, which takes many times its size in memory
MANIFEST, TENSORS, STATE = "manifest.json", "tensors.safetensors", "state.json"
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, AssertionError, RuntimeError, OverflowError)
_ATTEMPTS = 100  # to read a checkpoint while a running training replaces or removes it


def save(folder: Path, state: State, meta: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically: if the process is killed, either the old or the new one can be loaded.

    The parent folder must exist, so that a deleted run is not created again.
    """
    tensors: Tensors = {}
    tree, meta_tree = encode(state, tensors), encode(dict(meta), {})
    temporary = temporary_name()
    try:
        with open_folder(folder.parent) as parent:
            _delete_leftovers(parent)
            os.mkdir(temporary, dir_fd=parent)
            try:
                with open_folder(temporary, parent) as inside:
                    files = {
                        TENSORS: _write(TENSORS, inside, serialize(tensors)),
                        STATE: _write(STATE, inside, [json.dumps(tree, allow_nan=False).encode()]),
                    }
                    body = {"schema": SCHEMA, "library": ludus.__version__, "meta": meta_tree, "files": files}
                    _write(MANIFEST, inside, [_dump({**body, "sha256": hashlib.sha256(_dump(body)).hexdigest()})])
                    sync(*files, MANIFEST, ".", folder=inside)
                _rename_into_place(parent, temporary, folder.name)
            finally:
                delete(temporary, parent)
    except OSError as error:
        raise write_error(folder, error) from error


class Checkpoint:
    """A verified checkpoint with open files; tensors are read on demand."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any], state: bytes, tensors: FileIO) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = manifest["meta"]
        self.version = str(manifest["library"])[:40]  # of Ludus, when it was written
        try:
            self._tree, self._tensors = _parse(state), TensorFile(tensors)
            outline = decode(self._tree, self._tensors.outline)
            if not isinstance(outline, dict):
                raise TypeError("not a dict")
        except _MALFORMED as error:
            raise _damaged(folder / STATE, "is not the state of a checkpoint") from error
        self.outline: State = outline  # the state with meta tensors, which have a shape but no data

    def refuse_larger(self, limit: int) -> None:
        """Refuse more tensors than the run's settings can need, before anything is read."""
        size = sum(x.nbytes for x in self._tensors.outline.values())
        if size > limit:
            raise UserError(
                f'The checkpoint "{self.folder}" has {size:,} bytes, but the settings of its run need at most '
                f"{limit:,}; it was not read."
            )

    def read(self, *parts: str) -> State:
        """Read the state to the CPU, or only these parts of it."""
        tree = {name: node for name, node in self._tree.items() if not parts or name in parts}
        names = {name for node in tree.values() for name in tensor_names(node)}
        needed, free = sum(self._tensors.outline[name].nbytes for name in names), free_memory()
        if needed > free:
            raise UserError(
                f'The checkpoint "{self.folder}" needs {needed / 1e9:,.2f} GB of memory, but only {free / 1e9:,.2f} GB '
                "are free: close other programs, or use a machine with more memory."
            )
        try:
            state: State = decode(tree, self._tensors.read(names))
        except (*_MALFORMED, OSError) as error:
            raise _damaged(self.folder / TENSORS, "cannot be read") from error
        return state


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Open a checkpoint and verify all of its files."""
    with ExitStack() as stack:
        yield _open(folder, stack)


@contextmanager
def open_newest(run: RunDirectory, warn: Callable[[str], object]) -> Iterator[Checkpoint]:
    """Open the newest intact checkpoint of a run; ``warn`` is called for each damaged one."""
    damaged: dict[str, UserError] = {}
    for _ in range(_ATTEMPTS):
        damaged.clear()
        folders = step_folders(run.checkpoints)
        for folder in reversed(folders):
            with ExitStack() as stack:
                try:
                    checkpoint = _open(folder, stack)
                except UserError as error:
                    if current_path(folder) is not None or folder.is_symlink():  # else a running training deleted it
                        damaged[folder.name] = error
                    continue
                for name, problem in damaged.items():
                    warn(f"Checkpoint {name} is damaged, so {folder.name} is used instead: {problem}")
                yield checkpoint
                return
        if step_folders(run.checkpoints) == folders:
            break
    if not damaged:
        raise run.no_checkpoint()
    raise UserError(f'The run "{run.path}" has no intact checkpoint. {next(iter(damaged.values()))}')


def load(folder: Path) -> tuple[State, dict[str, Any]]:
    """Return the state, on the CPU, and the meta data of a checkpoint."""
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.read(), checkpoint.meta


def load_newest(run: RunDirectory, warn: Callable[[str], object]) -> tuple[State, dict[str, Any], Path]:
    """Return state, meta data and folder of the newest intact checkpoint; ``warn`` is called for each damaged one."""
    with open_newest(run, warn) as checkpoint:
        return checkpoint.read(), checkpoint.meta, checkpoint.folder


class CheckpointManager:
    """Writes the checkpoints of a run and deletes all but the newest ``keep`` and the best."""

    def __init__(self, run: RunDirectory, keep: int = 3) -> None:
        self._run, self._keep = run, keep

    def save(self, step: int, state: State, meta: Mapping[str, Any] | None = None) -> Path:
        """Write ``checkpoints/step_<step>/``; delete old ones, and those of later steps after a resume."""
        folder = self._run.checkpoints / f"step_{step}"
        if not os.path.lexists(folder.parent):
            try:
                folder.parent.mkdir()
                sync(self._run.path)
            except OSError as error:
                raise write_error(folder.parent, error) from error
        save(folder, state, {"step": step, **(meta or {})})
        if not os.path.lexists(self._run.saved_once):
            write_atomic(self._run.saved_once, b"")
        folders = step_folders(self._run.checkpoints)
        index = folders.index(folder)
        for other in folders[: max(index + 1 - self._keep, 0)] + folders[index + 1 :]:
            with suppress(OSError):  # the next save tries again
                remove(other)
        return folder

    def save_best(self, step: int, state: State, score: float, meta: Mapping[str, Any] | None = None) -> Path:
        """Write ``best/``, replacing the previous one."""
        save(self._run.best, state, {"step": step, "score": score, **(meta or {})})
        return self._run.best

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of this step."""
        return current_path(self._run.checkpoints / f"step_{step}") is not None


def _open(folder: Path, stack: ExitStack) -> Checkpoint:
    """Open a checkpoint; try again if a running training replaced it meanwhile."""
    for _ in range(_ATTEMPTS):
        before = _identity(folder)
        try:
            return _open_and_verify(folder, stack)
        except UserError:
            if _identity(folder) == before:
                raise
    raise UserError(f'The checkpoint "{folder}" is replaced faster than it can be read: save less often.')


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _open_and_verify(folder: Path, stack: ExitStack) -> Checkpoint:
    """Verify the files of a checkpoint; ``stack`` keeps them open, so that they stay readable if they are deleted."""
    found = current_path(folder)
    if found is None:
        raise UserError(f'There is no checkpoint "{folder}": give a folder that holds a {MANIFEST}.')
    with ExitStack() as files:
        try:
            parent = files.enter_context(open_folder(found.parent))
            inside = files.enter_context(open_folder(found.name, parent))
        except OSError as error:
            linked = error.errno == errno.ELOOP
            what = (
                "is a link: give the folder that it points to"
                if linked
                else f"cannot be read ({os_error_reason(error)})"
            )
            raise UserError(f'The checkpoint "{folder}" {what}.') from error
        manifest = _parse_manifest(folder, files.enter_context(_open_file(folder / MANIFEST, inside)))
        opened = {name: files.enter_context(_open_file(folder / name, inside)) for name in (TENSORS, STATE)}
        for name, file in opened.items():
            _verify(file, folder / name, manifest["files"][name])
        state = _read(opened[STATE], folder / STATE, max(STATE_LIMIT, free_memory() // 32))
        checkpoint = Checkpoint(folder, manifest, state, opened[TENSORS])
        stack.push(files.pop_all())
    return checkpoint


def _parse_manifest(folder: Path, file: FileIO) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = _parse(_read(file, path, MANIFEST_LIMIT))
        schema, library = manifest["schema"], manifest["library"]
        if schema != SCHEMA:
            raise UserError(
                f'The checkpoint "{folder}" has schema {schema!r:.20}, but Ludus {ludus.__version__} reads schema '
                f"{SCHEMA}: it was written by another version of Ludus ({str(library)[:20]}), which can read it."
            )
        digest = manifest.pop("sha256")
        intact = digest == hashlib.sha256(_dump(manifest)).hexdigest()
        manifest["meta"] = decode(manifest["meta"], {})
        entries = [(entry["bytes"], entry["sha256"]) for entry in manifest["files"].values()]
        if manifest["files"].keys() != {TENSORS, STATE} or not isinstance(manifest["meta"], dict):
            raise ValueError("other files, or no meta data")
        if not all(type(size) is int and isinstance(digest, str) for size, digest in entries):
            raise TypeError("not a size and a hash")
    except _MALFORMED as error:
        raise _damaged(path, "is not the manifest of a checkpoint") from error
    if not intact:
        raise _damaged(path, "was modified after it was written")
    return manifest


def _open_file(path: Path, folder: int) -> FileIO:
    try:
        return open_regular_file(path.name, folder=folder)
    except OSError as error:
        raise _damaged(path, f"cannot be read ({os_error_reason(error)})") from error


def _verify(file: FileIO, path: Path, entry: Mapping[str, Any]) -> None:
    """Compare size and hash of a file with the manifest."""
    size, expected = os.fstat(file.fileno()).st_size, entry["bytes"]
    if size != expected:
        what = "is truncated" if size < expected else "is too long"
        raise _damaged(path, f"{what}: it has {size} bytes, not {expected!r:.20}")
    if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):  # a sparse file would take hours to hash
        raise _damaged(path, f"has {size} bytes, more than the memory of this machine")
    try:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(path, f"cannot be read ({os_error_reason(error)})") from error
    if digest != entry["sha256"]:
        raise _damaged(path, "was modified after it was written")


def _read(file: FileIO, path: Path, limit: int) -> bytes:
    if (size := os.fstat(file.fileno()).st_size) > limit:
        raise _damaged(path, f"has {size} bytes, where at most {limit} are expected")
    try:
        file.seek(0)
        return file.readall()
    except OSError as error:
        raise _damaged(path, f"cannot be read ({os_error_reason(error)})") from error


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f'The file "{path}" {what}, so this checkpoint cannot be used: delete "{path.parent.name}" and use another '
        "checkpoint, or copy it again from its source."
    )


def _dump(tree: Any) -> bytes:
    return json.dumps(tree, allow_nan=False, indent=1).encode()


def _parse(data: bytes) -> Any:
    def refuse(token: str) -> NoReturn:
        raise ValueError(f"{token} is not JSON")

    return json.loads(data.decode(), parse_constant=refuse)


def _write(name: str, folder: int, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file; return size and hash of the data as it was in memory."""
    digest, size = hashlib.sha256(), 0
    with open_regular_file(name, "xb", folder) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            write_all(file, chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _rename_into_place(parent: int, temporary: str, name: str) -> None:
    """Rename the new checkpoint to its name; a previous one stays readable under another name until then."""
    previous, replaces = REPLACED + name, exists(name, parent)
    if replaces:
        delete(previous, parent)
        _rename(parent, name, previous)
    try:
        _rename(parent, temporary, name)
    except OSError:
        if replaces:
            _rename(parent, previous, name)
        raise
    os.fsync(parent)
    delete(previous, parent)


def _rename(parent: int, name: str, to: str) -> None:
    os.rename(name, to, src_dir_fd=parent, dst_dir_fd=parent)


def remove(folder: Path) -> None:
    """Delete a checkpoint under a temporary name, so that no reader finds half of it."""
    temporary = temporary_name()
    with open_folder(folder.parent) as parent:
        for name in (REPLACED + folder.name, folder.name):
            if exists(name, parent):
                _rename(parent, name, temporary)
                delete(temporary, parent)


def _delete_leftovers(parent: int) -> None:
    """Delete what a killed process left behind, except a previous checkpoint without a replacement."""
    for name in os.listdir(parent):
        if name.startswith(TEMPORARY) or (name.startswith(REPLACED) and exists(name.removeprefix(REPLACED), parent)):
            delete(name, parent)
