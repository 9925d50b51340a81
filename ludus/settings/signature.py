"""Sign settings files, to know which of them this user wrote on this machine.

The key is in ``$XDG_STATE_HOME/ludus/key`` (``~/.local/state/ludus/key``) and readable by its owner alone. The
signature covers the content of the file but not its path, so a run may be moved and copied.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from pathlib import Path

_KEY_BYTES = 32
_RETRIES = 100  # of 10 ms each, while another process writes the key
_PURPOSE = b"ludus config.toml\n"
_LINE = re.compile(rb"(?<=\n)# signature: ([0-9a-f]{64})\n\Z")


class NoKeyError(Exception):
    """There is no usable key; the message is a clause of a sentence."""


def key_path() -> Path:
    """Return the path of this user's key."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise NoKeyError("there is no home folder to keep a key in") from error
    return base / "ludus" / "key"


def sign(data: bytes) -> bytes:
    """Append a signature to ``data``; the first call creates the key."""
    body = _LINE.sub(b"", data)
    return body + b"# signature: " + _digest(_read_key() or _make_key(), body) + b"\n"


def signature_problem(data: bytes) -> str:
    """Return why the signature of ``data`` is missing or invalid; "" if it is valid."""
    found = _LINE.search(data)
    if found is None:
        return "it has no signature"
    try:
        key = _read_key()
    except NoKeyError as error:
        return f"its signature cannot be checked: {error}"
    if key is not None and hmac.compare_digest(found[1], _digest(key, data[: found.start()])):
        return ""
    return "another user or machine made it, or its config.toml was changed"


def _digest(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, _PURPOSE + body, hashlib.sha256).hexdigest().encode()


def _read_key() -> bytes | None:
    """Read the key; None if there is none yet."""
    path = key_path()
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoKeyError(f'the key "{path}" cannot be read ({error.strerror})') from error
    try:
        status = os.fstat(file)
        for _ in range(_RETRIES):
            if status.st_size:
                break
            time.sleep(0.01)  # another process has created the file and is writing the key
            status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _KEY_BYTES:
            raise NoKeyError(f'"{path}" is not a key (delete it)')
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise NoKeyError(f'the key "{path}" must belong to you and be readable by you alone (chmod 600)')
        return os.read(file, _KEY_BYTES)
    finally:
        os.close(file)


def _make_key() -> bytes:
    """Create the key, or return the one that another process has just created."""
    path, key = key_path(), secrets.token_bytes(_KEY_BYTES)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _read_key() or key
    except OSError as error:
        raise NoKeyError(f'the key "{path}" cannot be created ({error.strerror})') from error
    try:
        os.write(file, key)
        os.fsync(file)
    except OSError as error:  # such as a full disk: leave no empty key behind
        path.unlink()
        raise NoKeyError(f'the key "{path}" cannot be created ({error.strerror})') from error
    finally:
        os.close(file)
    return key
