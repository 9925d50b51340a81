"""Read and write ``config.toml``: all settings of a run, each with the origin of its value as a comment.

TOML has no null, so None is written as the string ``"None"``, as on the command line. Arrays are read as tuples.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus.core.errors import UserError
from ludus.core.files import open_regular_file, os_error_reason, write_atomic
from ludus.settings.signature import NoKeyError, sign, signature_problem

Settings = dict[str, Any]  # "agent.learning_rate" → str, int, float, bool, None, or a tuple of these
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NONE = "None"
_MAX_BYTES = 1 << 18
_COMMENT = "  # "


def write_config(path: Path, settings: Mapping[str, Any], origins: Mapping[str, str], signed: bool = False) -> str:
    """Write settings, each with its origin (``default`` if none is given) as a comment.

    If ``signed``, append a signature, so that this user's commands trust the file; return why that failed, or "".
    """
    data, reason = render(settings, origins).encode(), ""
    if signed:
        try:
            data = sign(data)
        except NoKeyError as error:
            reason = str(error)
    write_atomic(path, data)
    return reason


def render(settings: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return the text of a ``config.toml``: top-level values first, then the tables in order."""
    _check_names(settings)
    tables: dict[str, list[str]] = {"": []}
    for name, value in settings.items():
        table, _, key = name.rpartition(".")
        origin = "".join(c if c.isprintable() else "?" for c in " ".join(origins.get(name, "default").split()))
        line = f"{_key(key)} = {_value(name, value)}{_COMMENT}{origin}"
        tables.setdefault(table, []).append(line)
    head = tables.pop("")
    parts = [head] if head else []
    parts += [[f"[{'.'.join(map(_key, table.split('.')))}]", *lines] for table, lines in tables.items()]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def read_config(path: Path) -> Settings:
    """Read the settings of a run by their dotted names."""
    return _settings(_read(path), path)


def read_signed_config(path: Path, follow_links: bool = False) -> tuple[Settings, str]:
    """Read the settings, and why the file is not trusted to be written by this user ("" if it is).

    ``follow_links`` is for paths that the user typed.
    """
    data = _read(path, follow_links)
    return _settings(data, path), signature_problem(data)


def flatten(nested: Mapping[str, Any]) -> Settings:
    """Join the keys of nested tables by dots."""
    flat: Settings = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": x for inner, x in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def read_origins(path: Path) -> dict[str, str]:
    """Read the origins that ``write_config`` wrote; a setting without a comment has none."""
    header = ""
    origins: dict[str, str] = {}
    for line in _read(path).decode().split("\n"):
        if line.startswith("["):
            header = line
        setting, comment, origin = line.rpartition(_COMMENT)
        if comment:
            try:
                parsed = tomllib.loads(f"{header}\n{setting}")
            except (ValueError, RecursionError):  # the comment is inside a string, or the value has several lines
                continue
            origins |= dict.fromkeys(flatten(parsed), origin)
    return origins


def _read(path: Path, follow_links: bool = False) -> bytes:
    try:
        with open(path, "rb", buffering=0) if follow_links else open_regular_file(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UserError(
            f'The settings file "{path}" cannot be read ({os_error_reason(error)}): check its name.'
        ) from error
    if len(data) > _MAX_BYTES:
        raise UserError(f'The settings file "{path}" is too large to be one: give another.')
    return data


def _settings(data: bytes, path: Path) -> Settings:
    try:
        flat = flatten(tomllib.loads(data.decode()))
    except (ValueError, RecursionError) as error:
        raise UserError(f'The settings file "{path}" is not valid TOML: {error}.') from error
    return {name: _check_value(value, name, path) for name, value in flat.items()}


def _check_value(value: Any, name: str, path: Path) -> Any:
    if isinstance(value, list):
        return tuple(_check_value(item, name, path) for item in value)
    if not isinstance(value, str | int | float | bool):
        raise UserError(
            f'The setting {name} in "{path}" is a {type(value).__name__}: give a string, number, boolean or an array.'
        )
    return None if value == _NONE else value


def _check_names(settings: Mapping[str, Any]) -> None:
    for name in settings:
        parts = name.split(".")
        if "" in parts:
            raise ValueError(f"{name!r} is not a dotted name")
        for end in range(1, len(parts)):
            if (table := ".".join(parts[:end])) in settings:
                raise ValueError(f"{table} is a setting, so {name} cannot be one")


def _key(part: str) -> str:
    return part if _BARE_KEY.fullmatch(part) else _string(part)


def _value(name: str, value: Any) -> str:
    if value is None:
        return f'"{_NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        return repr(float(value))  # inf, nan and 1e-05 are written as in Python
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(name, item) for item in value) + "]"
    raise TypeError(f"{name}: a setting cannot be a {type(value).__name__}")


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
