"""Which settings files this user wrote on this machine: each ends with a signature made with a key of the user's.

The key lies outside of all runs, in ``$XDG_STATE_HOME/ludus/key`` (``~/.local/state/ludus/key``), and only its owner
can read it. The signature covers the content, not the place: a run may be moved and copied.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

_SIZE = 32  # bytes of a key
_WAITS = 100  # of a hundredth of a second, for a key that is just being written
_PURPOSE = b"ludus config.toml\n"
_LINE = re.compile(rb"(?<=\n)# signature: ([0-9a-f]{64})\n\Z")


class NoKeyError(Exception):
    """Why there is no key to sign or check with; a clause that fits into a sentence."""


def key_path() -> Path:
    """The path of this user's key."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise NoKeyError("no home folder is known to keep a key in") from error
    return base / "ludus" / "key"


def sign(data: bytes) -> bytes:
    """Return ``data`` with a line at its end that proves who wrote it; the first call makes the key."""
    body = _LINE.sub(b"", data)
    return body + b"# signature: " + _digest(_read_key() or _make_key(), body) + b"\n"


def signature_problem(data: bytes) -> str:
    """Return why ``data`` is not known to be written by this user on this machine; nothing where it is."""
    found = _LINE.search(data)
    if found is None:
        return "it has no signature"
    try:
        key = _read_key()
    except NoKeyError as error:
        return f"{error}, so that its signature cannot be checked"
    if key is not None and hmac.compare_digest(found[1], _digest(key, data[: found.start()])):
        return ""
    return "another user or machine made it, or its config.toml was changed since"


def _digest(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, _PURPOSE + body, hashlib.sha256).hexdigest().encode()


def _read_key() -> bytes | None:
    """The key, or None where there is none yet."""
    path = key_path()
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoKeyError(f'the key "{path}" cannot be read ({error.strerror})') from error
    try:
        status = os.fstat(file)
        for _ in range(_WAITS):
            if status.st_size:
                break
            time.sleep(0.01)  # another process has made the file and will write the key
            status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _SIZE:
            raise NoKeyError(f'"{path}" is not a key (delete it)')
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise NoKeyError(f'the key "{path}" must belong to you and be readable by you alone (chmod 600)')
        return os.read(file, _SIZE)
    finally:
        os.close(file)


def _make_key() -> bytes:
    path, key = key_path(), secrets.token_bytes(_SIZE)
    temporary = path.with_name(f".tmp-{secrets.token_hex(16)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(file, key)
            os.fsync(file)
        finally:
            os.close(file)
        try:
            os.link(temporary, path)  # of two processes that make a key at once, one does
        except FileExistsError:
            return _read_key() or key
        except OSError:  # a file system without hard links
            return _make_in_place(path, key)
    except OSError as error:
        raise NoKeyError(f'the key "{path}" cannot be made ({error.strerror})') from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    return key


def _make_in_place(path: Path, key: bytes) -> bytes:
    """Write the key under its final name, or return the one that another process made meanwhile."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _read_key() or key
    try:
        os.write(file, key)
        os.fsync(file)
    finally:
        os.close(file)
    return key
