"""Plain files on a disk that may be full, may fail and may have been tampered with.

What is opened here is a regular file of its own, never a link, a pipe or a device; what is written is on disk or an
OSError says why not. Folders within a run are opened as descriptors, without following links, and what lies in them is
named relative to these.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from ludus.core.errors import UserError

LINK = "it is a link"
TEMPORARY = ".tmp-"  # no reader looks at a name that starts so; the next writer removes it


def temporary_name(suffix: str = "") -> str:
    """A name that nobody can have put a link at before."""
    return f"{TEMPORARY}{secrets.token_hex(16)}{suffix}"


def make_folder(path: Path) -> None:
    """Make a folder where there is none, and those around it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if path.is_symlink():  # that leads nowhere
            raise OSError(errno.ELOOP, LINK, os.fspath(path)) from error
        raise


@contextmanager
def open_folder(path: str | Path, folder: int | None = None, follows: bool = False) -> Iterator[int]:
    """A descriptor of a folder that is no link, unless it ``follows`` one; ``path`` may be relative to another."""
    if not follows and stat.S_ISLNK(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode):
        raise OSError(errno.ELOOP, LINK, os.fspath(path))
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follows else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def exists(name: str, folder: int) -> bool:
    """Whether a folder has something of this name, be it a link that leads nowhere."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def open_regular_file(path: str | Path, mode: str = "rb", folder: int | None = None) -> FileIO:
    """Open a regular file without a buffer; with the descriptor of its ``folder``, the last part of ``path`` is used.

    Without one, a link is refused as well, but the folder that it lies in may be behind one.
    """

    def opener(name: str, flags: int) -> int:
        name = name if folder is None else os.path.basename(name)
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=folder)  # a pipe does not block

    file = FileIO(path, mode, opener=opener)
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a plain file")
    if status.st_nlink > 1 and file.writable():  # what is written to it would be written elsewhere too
        file.close()
        raise OSError(errno.EMLINK, "it is a hard link")
    return file


def open_append(path: Path) -> FileIO:
    """Open a file of a run's own folder to append to, making it where there is none."""
    try:
        return open_regular_file(path, "ab+")
    except OSError as error:
        raise write_error(path, error) from error


def append(file: FileIO, data: bytes) -> None:
    """Append all of ``data``, or nothing where the disk is full."""
    end = file.seek(0, os.SEEK_END)
    try:
        write_all(file, data)
    except OSError as error:
        with suppress(OSError):
            file.truncate(end)
        raise write_error(file.name, error) from error


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write every byte: one call of the system may write fewer."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def write_atomic(path: Path, data: bytes) -> None:
    """Write a small file in one piece: whenever killed, the old or the new one is there."""
    temporary = temporary_name()
    try:
        with open_folder(path.parent) as folder:
            try:
                with open_regular_file(temporary, "xb", folder) as file:
                    write_all(file, data)
                    os.fsync(file.fileno())
                os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except BaseException:
                delete(temporary, folder)
                raise
    except OSError as error:
        raise write_error(path, error) from error


def sync(*paths: str | Path, folder: int | None = None) -> None:
    """Wait until files or folders are on disk; all at once, as a disk takes for many hardly longer than for one."""
    if len(paths) == 1:
        _sync(paths[0], folder)
    else:
        with ThreadPoolExecutor(len(paths)) as pool:
            list(pool.map(lambda path: _sync(path, folder), paths))


def _sync(path: str | Path, folder: int | None) -> None:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(path: str | Path, folder: int | None = None) -> None:
    """Delete a folder, a file or a link, not what a link points to; what cannot be deleted stays."""
    with suppress(OSError):
        if stat.S_ISDIR(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(path, ignore_errors=True, dir_fd=folder)
        else:
            os.unlink(path, dir_fd=folder)


def os_error_reason(error: OSError) -> str:
    """Why a file could not be opened, read or written."""
    return LINK if error.errno == errno.ELOOP else str(error.strerror)


def link_error(path: object) -> UserError:
    """The sentence for a link where a run has a file or folder of its own."""
    return UserError(f'"{path}" is a link, and none is followed inside of a run: replace it by what it points to.')


def write_error(path: object, error: OSError) -> UserError:
    """The sentence for a full disk, a missing right and the like."""
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return link_error(error.filename if error.strerror == LINK else path)
    if error.errno == errno.ENOENT:
        return UserError(f'"{path}" cannot be written: its folder was removed or moved.')
    return UserError(f'"{path}" cannot be written ({os_error_reason(error)}): free some space or give another place.')
