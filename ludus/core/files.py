"""File operations inside of run folders.

Only regular files are opened, never links, pipes or devices. Folders are opened as descriptors without following
links, and the files in them relative to these, so a run folder from elsewhere cannot redirect writes.
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
TEMPORARY = ".tmp-"  # readers ignore names with this prefix; the next writer removes them


def temporary_name(suffix: str = "") -> str:
    """Return an unpredictable name, so that nobody can have placed a link there."""
    return f"{TEMPORARY}{secrets.token_hex(16)}{suffix}"


def make_folder(path: Path) -> None:
    """Create a folder and its parents if needed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if path.is_symlink():  # a broken link
            raise OSError(errno.ELOOP, LINK, os.fspath(path)) from error
        raise


@contextmanager
def open_folder(path: str | Path, folder: int | None = None, follow_links: bool = False) -> Iterator[int]:
    """Open a descriptor of a folder; ``path`` may be relative to another descriptor, ``folder``."""
    if not follow_links and stat.S_ISLNK(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode):
        raise OSError(errno.ELOOP, LINK, os.fspath(path))
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def exists(name: str, folder: int) -> bool:
    """Return whether ``name`` exists in ``folder``, also as a broken link."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def open_regular_file(path: str | Path, mode: str = "rb", folder: int | None = None) -> FileIO:
    """Open a regular file, unbuffered; if ``folder`` is given, by the last part of ``path`` relative to it."""

    def opener(name: str, flags: int) -> int:
        name = name if folder is None else os.path.basename(name)
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=folder)  # do not block on a pipe

    file = FileIO(path, mode, opener=opener)
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    if status.st_nlink > 1 and file.writable():  # writing would change another file
        file.close()
        raise OSError(errno.EMLINK, "it is a hard link")
    return file


def open_append(path: Path) -> FileIO:
    """Open a file to append to, creating it if needed."""
    try:
        return open_regular_file(path, "ab+")
    except OSError as error:
        raise write_error(path, error) from error


def append(file: FileIO, data: bytes) -> None:
    """Append all of ``data``, or nothing if the disk is full."""
    end = file.seek(0, os.SEEK_END)
    try:
        write_all(file, data)
    except OSError as error:
        with suppress(OSError):
            file.truncate(end)
        raise write_error(file.name, error) from error


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write every byte; a single system call may write fewer."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a small file atomically."""
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
    """Wait until files or folders are on disk, in parallel, which takes hardly longer than for one."""

    def fsync(path: str | Path) -> None:
        descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(fsync, paths))


def delete(path: str | Path, folder: int | None = None) -> None:
    """Delete a folder, a file or a link (not its target); ignore errors."""
    with suppress(OSError):
        if stat.S_ISDIR(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(path, ignore_errors=True, dir_fd=folder)
        else:
            os.unlink(path, dir_fd=folder)


def os_error_reason(error: OSError) -> str:
    """Return why a file could not be opened, read or written."""
    return LINK if error.errno == errno.ELOOP else str(error.strerror)


def link_error(path: object) -> UserError:
    """Return the error for a link inside of a run folder."""
    return UserError(f'"{path}" is a link, which is not followed inside of a run folder: replace it by its target.')


def write_error(path: object, error: OSError) -> UserError:
    """Return the error for a file that cannot be written."""
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return link_error(error.filename if error.strerror == LINK else path)
    if error.errno == errno.ENOENT:
        return UserError(f'"{path}" cannot be written: its folder was removed or moved.')
    return UserError(f'"{path}" cannot be written ({os_error_reason(error)}): free some space or use another folder.')
