"""Plain files on a disk that may be full, may fail and may have been tampered with.

What is opened here is a regular file of its own, never a link, a pipe or a device; what is written is on disk or an
OSError says why not.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path

from ludus.core.errors import UserError

TEMPORARY = ".tmp-"  # no reader looks at a name that starts so; the next writer removes it


def open_plain(path: str | Path, mode: str = "rb", folder: int | None = None) -> FileIO:
    """Open a regular file without a buffer; ``path`` may be relative to the descriptor of a folder."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=folder)  # a pipe does not block

    file = FileIO(path, mode, opener=opener)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a plain file")
    return file


def open_append(path: Path) -> FileIO:
    """Open a file to append to, making it where there is none."""
    try:
        return open_plain(path, "ab+")
    except OSError as error:
        raise unwritable(path, error) from error


def append(file: FileIO, data: bytes) -> None:
    """Append all of ``data``, or nothing where the disk is full."""
    end = file.seek(0, os.SEEK_END)
    try:
        write_all(file, data)
    except OSError as error:
        with suppress(OSError):
            file.truncate(end)
        raise unwritable(file.name, error) from error


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write every byte: one call of the system may write fewer."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def replace(path: Path, data: bytes) -> None:
    """Write a small file in one piece: whenever killed, the old or the new one is there."""
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        with temporary.open("wb", buffering=0) as file:
            write_all(file, data)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        delete(temporary)
        raise unwritable(path, error) from error


def sync(*paths: Path) -> None:
    """Wait until files or folders are on disk; all at once, as a disk takes for many hardly longer than for one."""
    if len(paths) == 1:
        _sync(paths[0])
    else:
        with ThreadPoolExecutor(len(paths)) as pool:
            list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Delete a folder, a file or a link, not what a link points to; what cannot be deleted stays."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def why(error: OSError) -> str:
    """Why a file could not be opened, read or written."""
    return "it is a link" if error.errno == errno.ELOOP else str(error.strerror)


def unwritable(path: object, error: OSError) -> UserError:
    """The sentence for a full disk, a missing right and the like."""
    if error.errno == errno.ENOENT:
        return UserError(f'"{path}" cannot be written: its folder was removed or moved.')
    return UserError(f'"{path}" cannot be written ({why(error)}): free some space or give another place.')
