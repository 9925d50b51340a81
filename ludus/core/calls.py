"""Parse settings that name a class with arguments, such as ``lstm(size=128, layers=2)``. Needs no torch."""

from __future__ import annotations

import re
import tomllib
from typing import Any, NamedTuple

from ludus.core.errors import UserError

_CALL = re.compile(r"([\w.:<>]+)(?:\((.*)\))?", re.DOTALL)


class Call(NamedTuple):
    """A name, as in a table of classes or ``package.module:Class``, and keyword arguments."""

    name: str
    arguments: dict[str, Any]


def parse_call(text: str, setting: str, example: str = "lstm(size=128)") -> Call:
    """Parse ``name`` or ``name(key=value, …)`` with values in TOML syntax; lists become tuples."""
    match = _CALL.fullmatch(text.strip())
    if match is None:
        raise UserError(f'{setting} has "{text}", which is not a name or name(key=value, …); write it like {example}.')
    try:
        arguments = parse_toml(f"{{{match[2] or ''}}}")
    except ValueError as error:
        raise UserError(
            f'{setting} has "{text}", but its arguments cannot be read as TOML; write key=value separated by commas, '
            "true or false in lower case, and quotes around text."
        ) from error
    return Call(match[1], {key: _tuples(value) for key, value in arguments.items()})


def parse_toml(text: str) -> Any:
    """Parse one value in TOML syntax."""
    document = tomllib.loads(f"value = {text}")
    if set(document) != {"value"}:  # the text has a second line
        raise ValueError(text)
    return document["value"]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
