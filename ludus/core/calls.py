"""Parse settings that name a class with arguments, such as ``lstm(size=128, layers=2)``. Needs no torch."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

from ludus.core.arguments import argument_types, mismatch
from ludus.core.errors import UserError, did_you_mean

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


def argument_defaults(function: Callable[..., Any], given: int) -> dict[str, Any]:
    """Return the arguments that a setting may give with their defaults: those after the first ``given``."""
    parameters = list(inspect.signature(function).parameters.values())[given:]
    return {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def check_arguments(function: Callable[..., Any], call: Call, given: int, what: str) -> None:
    """Refuse arguments that do not exist or are not of the annotated type; ``what`` is the setting and its value."""
    known, types = argument_defaults(function, given), argument_types(function)
    any_name = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    for name, value in call.arguments.items():
        if name not in known and not any_name:
            exist = f"its arguments are {', '.join(known)}" if known else "it has no arguments"
            raise UserError(f'{what} has no argument "{name}": {exist}.{did_you_mean(name, known)}')
        if name in known and name in types and (expected := mismatch(value, types[name])):
            raise UserError(f"{what}: {name} is {value!r}, but must be {expected}.")


def parse_toml(text: str) -> Any:
    """Parse one value in TOML syntax."""
    document = tomllib.loads(f"value = {text}")
    if set(document) != {"value"}:  # the text has a second line
        raise ValueError(text)
    return document["value"]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
