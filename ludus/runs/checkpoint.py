"""Checkpoints: folders written atomically and verified by SHA-256 before they are used.

``manifest.json`` (schema, versions, meta, size and SHA-256 of each file, and a digest of itself),
``tensors.safetensors`` and ``state.json``. Nothing pickled is written or read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import ludus
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
from ludus.runs.encoding import HEADER, TensorFile, decode, encode, names_of, serialize
from ludus.runs.folder import ASIDE, RunDirectory, current_path, step_folders

T = TypeVar("T")
SCHEMA = 3
MANIFEST, TENSORS, STATE = "manifest.json", "tensors.safetensors", "state.json"
_MANIFEST_LIMIT = 1 << 24
_STATE_LIMIT = 1 << 26
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MALFORMED = (*(ValueError, TypeError, KeyError, AttributeError, AssertionError, RuntimeError, OverflowError),)
_TRIES = 100  # how often a reader begins again because a running training replaced what it reads

Entry = dict[str, Any]  # "bytes" and "sha256" of a file


class Manifest(NamedTuple):
    """What ``manifest.json`` says."""

    files: dict[str, Entry]
    meta: dict[str, Any]
    version: str  # of Ludus, when it was written


def save(folder: Path, state: State, meta: Mapping[str, Any]) -> None:
    """Write a checkpoint in one piece: killed at any instant, the old one or the new one can be loaded.

    The folder around it must exist: that of a run that was removed is not made again.
    """
    tensors: Tensors = {}
    tree, meta_tree = encode(state, tensors), encode(dict(meta), {})
    temporary = temporary_name()
    try:
        with open_folder(folder.parent) as parent:
            _clean(parent)
            os.mkdir(temporary, dir_fd=parent)
            try:
                with open_folder(temporary, parent) as here:
                    entries = {
                        TENSORS: _write(TENSORS, here, serialize(tensors)),
                        STATE: _write(STATE, here, [json.dumps(tree, allow_nan=False).encode()]),
                    }
                    _write(MANIFEST, here, [_manifest(entries, meta_tree)])
                    sync(*entries, MANIFEST, ".", folder=here)
                _place(parent, temporary, folder.name)
            finally:
                delete(temporary, parent)
    except OSError as error:
        raise write_error(folder, error) from error


class Checkpoint:
    """A verified checkpoint with open files; tensors are read on demand."""

    def __init__(self, folder: Path, manifest: Manifest, state: bytes, tensors: FileIO) -> None:
        self.folder, self.meta, self.version = folder, manifest.meta, manifest.version
        try:
            self._tree, self._tensors = _parse(state), TensorFile(tensors)
            outline = decode(self._tree, self._tensors.outline)
            if not isinstance(outline, dict):
                raise TypeError("not a dict")
        except _MALFORMED as error:
            raise _damaged(folder / STATE, "does not hold a state") from error
        self.outline: State = outline  # the state, whose tensors have shapes but no content

    def bytes(self, *parts: str) -> int:
        """The memory that the tensors of these parts of the state take, or those of all."""
        return sum(self._tensors.outline[name].nbytes for name in self._names(parts))

    def refuse_larger(self, most: int) -> None:
        """Refuse a checkpoint that would take more memory than its run can have saved."""
        if (size := self.bytes()) > most:
            raise UserError(
                f'The checkpoint "{self.folder}" holds {size / 1e6:,.0f} MB, where the settings of its run can need '
                f"{most / 1e6:,.0f} MB at most: take another checkpoint, or copy it again from its source."
            )

    def read(self, *parts: str) -> State:
        """The state, on the CPU; of these parts alone, where some are named."""
        needed, free = self.bytes(*parts), free_memory()
        if needed > free:
            raise UserError(
                f'The checkpoint "{self.folder}" needs {needed / 1e9:,.2f} GB of memory, of which {free / 1e9:,.2f} GB '
                "are free: end other programs, or take a machine with more."
            )
        tree = {name: node for name, node in self._tree.items() if not parts or name in parts}
        try:
            state: State = decode(tree, self._tensors.read(self._names(parts)))
        except (*_MALFORMED, OSError) as error:
            raise _damaged(self.folder / TENSORS, "cannot be read") from error
        return state

    def _names(self, parts: tuple[str, ...]) -> set[str]:
        return {name for part, node in self._tree.items() if not parts or part in parts for name in names_of(node)}


@contextmanager
def opened(folder: Path, limit: int | None = None) -> Iterator[Checkpoint]:
    """Open a checkpoint and check every byte of it; one of more than ``limit`` bytes of tensors is refused unread."""
    with ExitStack() as stack:
        yield _retry(folder, lambda place: _enter(place, stack, limit))


@contextmanager
def opened_newest(run: RunDirectory, warn: Callable[[str], object]) -> Iterator[Checkpoint]:
    """Open the newest whole checkpoint of a run; ``warn`` gets a sentence on each damaged one."""
    with ExitStack() as stack:
        yield _newest(run, warn, stack)


def load(folder: Path) -> tuple[State, dict[str, Any]]:
    """Return state and meta of a checkpoint, on the CPU; whatever is wrong with it is a UserError."""
    with opened(folder) as checkpoint:
        return checkpoint.read(), checkpoint.meta


def load_newest(run: RunDirectory, warn: Callable[[str], object]) -> tuple[State, dict[str, Any], Path]:
    """Load the newest whole checkpoint of a run and say where it is; ``warn`` gets a sentence on each damaged one."""
    with opened_newest(run, warn) as checkpoint:
        return checkpoint.read(), checkpoint.meta, checkpoint.folder


def _newest(run: RunDirectory, warn: Callable[[str], object], stack: ExitStack) -> Checkpoint:
    for _ in range(_TRIES):
        damaged: dict[str, UserError] = {}
        folders = step_folders(run.checkpoints)
        for folder in reversed(folders):
            try:
                checkpoint = _retry(folder, lambda place: _enter(place, stack))
            except UserError as error:
                if current_path(folder) is not None or folder.is_symlink():  # else training removed it
                    damaged[folder.name] = error
                continue
            for name, found in damaged.items():
                warn(f"Checkpoint {name} is damaged, and {folder.name} is taken in its place: {found}")
            return checkpoint
        if step_folders(run.checkpoints) == folders:
            break
    if not damaged:
        raise UserError(f'The run "{run.path}" has no checkpoint yet: let it train until its first save.')
    raise UserError(f'The run "{run.path}" has no whole checkpoint. {next(iter(damaged.values()))}')


class CheckpointKeeper:
    """Keeps the last ``keep`` checkpoints of a run and its best one."""

    def __init__(self, run: RunDirectory, keep: int = 3) -> None:
        self._run, self._keep = run, keep

    def save(self, step: int, state: State, meta: Mapping[str, Any] | None = None) -> Path:
        """Write ``checkpoints/step_<step>/`` and remove what is too old, or later than a run that was resumed."""
        folder = self._run.checkpoints / f"step_{step}"
        _make_folder(folder.parent)
        save(folder, state, {"step": step, **(meta or {})})
        if not os.path.lexists(self._run.saved_once):
            write_atomic(self._run.saved_once, b"")
        folders = step_folders(self._run.checkpoints)
        here = folders.index(folder)
        for other in folders[: max(here + 1 - self._keep, 0)] + folders[here + 1 :]:
            with suppress(OSError):  # the next save tries again
                _remove(other)
        return folder

    def save_best(self, step: int, state: State, score: float, meta: Mapping[str, Any] | None = None) -> Path:
        """Write ``best/``, in place of the one before."""
        save(self._run.best, state, {"step": step, "score": score, **(meta or {})})
        return self._run.best

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of this step."""
        return current_path(self._run.checkpoints / f"step_{step}") is not None


def _make_folder(folder: Path) -> None:
    """Make a folder within a run, whose own folder must exist."""
    if os.path.lexists(folder):
        return
    try:
        folder.mkdir()
        sync(folder.parent)
    except OSError as error:
        raise write_error(folder, error) from error


def _retry(folder: Path, read: Callable[[Path], T]) -> T:
    """Retry where a running training replaced the checkpoint while it was read."""
    for _ in range(_TRIES):
        before = _identity(folder)
        try:
            return read(folder)
        except UserError:
            if _identity(folder) == before:
                raise
    raise UserError(f'The checkpoint "{folder}" is being replaced faster than it can be read: save less often.')


def _enter(folder: Path, stack: ExitStack, limit: int | None = None) -> Checkpoint:
    """Open and check the files of a checkpoint; ``stack`` holds them open, so that no one can remove them."""
    with _opened(folder) as here, ExitStack() as own:
        manifest = _read_manifest(folder, here)
        entries = manifest.files
        files = {name: own.enter_context(_open(folder / name, here)) for name in entries}
        most = HEADER + (_memory() if limit is None else limit)
        small = max(_STATE_LIMIT, free_memory() // 32)  # JSON takes many times its size
        for name, entry in entries.items():
            _check(files[name], folder / name, entry, small if name == STATE else most)
        checkpoint = Checkpoint(folder, manifest, _read(files[STATE], folder / STATE, small), files[TENSORS])
        if limit is not None and checkpoint.bytes() > limit:
            raise _too_large(folder / TENSORS, checkpoint.bytes(), limit)
        stack.push(own.pop_all())
    return checkpoint


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of the checkpoint's folder: it stays that folder when another takes the name."""
    found = current_path(folder)
    if found is None:
        raise UserError(f'There is no checkpoint "{folder}": give a folder that holds a {MANIFEST}.')
    with ExitStack() as stack:
        try:
            parent = stack.enter_context(open_folder(found.parent))
            here = stack.enter_context(open_folder(found.name, parent))
        except OSError as error:
            what = "is a link: give the folder that it points to"
            if error.errno != errno.ELOOP:
                what = f"cannot be read ({os_error_reason(error)})"
            raise UserError(f'The checkpoint "{folder}" {what}.') from error
        yield here


def _read_manifest(folder: Path, here: int) -> Manifest:
    path = folder / MANIFEST
    with _open(path, here) as file:
        data = _read(file, path, _MANIFEST_LIMIT)
    try:
        body = _parse(data)
        schema = body["schema"]
        if schema != SCHEMA:
            raise UserError(
                f'The checkpoint "{folder}" has schema {schema!r:.20}, and Ludus {ludus.__version__} reads schema '
                f"{SCHEMA}: use the Ludus that wrote it, {body.get('library')!r:.20}."
            )
        digest = body.pop("sha256")
        entries, meta = body["files"], decode(body["meta"], {})
        _check_entries(folder, entries)
        intact = digest == hashlib.sha256(_dump(body)).hexdigest() and isinstance(meta, dict)
    except _MALFORMED as error:
        raise _damaged(path, "is not the manifest of a checkpoint") from error
    if not intact:
        raise _damaged(path, "was edited after it was written")
    return Manifest(entries, meta, str(body["library"])[:40])


def _check_entries(folder: Path, entries: dict[str, Any]) -> None:
    for name, entry in entries.items():
        if not _FILE_NAME.fullmatch(name):
            raise _damaged(folder / MANIFEST, f"names {name[:100]!r}, which is not a plain file name")
        if type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
            raise TypeError("not the size and hash of a file")
    if not {TENSORS, STATE} <= entries.keys():
        raise _damaged(folder / MANIFEST, f"does not name {TENSORS} and {STATE}")


def _open(path: Path, here: int) -> FileIO:
    try:
        return open_regular_file(path.name, folder=here)
    except OSError as error:
        raise _damaged(path, f"cannot be read ({os_error_reason(error)})") from error


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check(file: FileIO, path: Path, entry: Entry, limit: int) -> None:
    """Refuse a file of another size or hash than the manifest says, or too large, holding none of it in memory."""
    size, memory = os.fstat(file.fileno()).st_size, _memory()
    if size < entry["bytes"]:
        raise _damaged(path, f"is cut short: it has {size} bytes of {entry['bytes']!r:.20}")
    if size > entry["bytes"]:
        raise _damaged(path, f"has {size} bytes where {entry['bytes']!r:.20} are expected")
    if size > memory:  # a hole of a terabyte takes no place on a disk, and hours to hash
        raise _damaged(path, f"has {size} bytes, more than this machine has memory")
    if size > limit:
        raise _too_large(path, size, limit)
    try:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(path, f"cannot be read ({os_error_reason(error)})") from error
    if digest != entry["sha256"]:
        raise _damaged(path, "was edited after it was written")


def _read(file: FileIO, path: Path, limit: int) -> bytes:
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise _damaged(path, f"has {size} bytes where at most {limit} are expected")
    try:
        file.seek(0)
        return file.readall()
    except OSError as error:
        raise _damaged(path, f"cannot be read ({os_error_reason(error)})") from error


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f'The file "{path}" {what}, so this checkpoint cannot be used: '
        f'delete "{path.parent.name}" and take another checkpoint, or copy it again from its source.'
    )


def _too_large(path: Path, size: int, limit: int) -> UserError:
    return UserError(
        f'The file "{path}" has {size:,} bytes, where the settings of its run can need {limit:,} at most, so it is not '
        "read: undo what was changed in its config.toml, or copy the run again from its source."
    )


def _manifest(entries: Mapping[str, Entry], meta: Any) -> bytes:
    body = {"schema": SCHEMA, "library": ludus.__version__, "meta": meta, "files": entries}
    return _dump({**body, "sha256": hashlib.sha256(_dump(body)).hexdigest()})


def _dump(tree: Any) -> bytes:
    return json.dumps(tree, allow_nan=False, indent=1).encode()


def _parse(data: bytes) -> Any:
    return json.loads(data.decode(), parse_constant=_no_constant)


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _place(parent: int, temporary: str, name: str) -> None:
    """Rename the new checkpoint into place; the previous one is kept under another name until then."""
    aside, replaces = ASIDE + name, exists(name, parent)
    if replaces:
        delete(aside, parent)
        _rename(parent, name, aside)
    try:
        _rename(parent, temporary, name)
    except OSError:
        if replaces:
            _rename(parent, aside, name)
        raise
    os.fsync(parent)
    delete(aside, parent)


def _rename(parent: int, name: str, to: str) -> None:
    os.rename(name, to, src_dir_fd=parent, dst_dir_fd=parent)


def _remove(folder: Path) -> None:
    """Rename a checkpoint to a temporary name, then delete it, so that no reader sees half of it."""
    doomed = temporary_name()
    with open_folder(folder.parent) as parent:
        for name in (ASIDE + folder.name, folder.name):
            if exists(name, parent):
                _rename(parent, name, doomed)
                delete(doomed, parent)


def _clean(parent: int) -> None:
    """Remove what a killed writer left, except a previous checkpoint whose replacement is missing."""
    for name in os.listdir(parent):
        if name.startswith(TEMPORARY) or (name.startswith(ASIDE) and exists(name.removeprefix(ASIDE), parent)):
            delete(name, parent)


def _write(name: str, folder: int, chunks: Iterable[bytes | memoryview]) -> Entry:
    """Write a new file and return its size and hash as they were in memory."""
    digest, size = hashlib.sha256(), 0
    with open_regular_file(name, "xb", folder) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            write_all(file, chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
