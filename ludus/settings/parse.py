"""Convert a word of the command line, a TOML value or a Python value to the type of a setting."""

from __future__ import annotations

import math
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ludus.core.errors import UserError, did_you_mean
from ludus.core.schedule import KINDS, RETURN_KINDS, Schedule, example, read_schedule

BOOLEANS = {"true": True, "false": False}
INTEGER_LIMIT = 2**63  # torch and numpy have 64-bit integers
FAILURES = (TypeError, ValueError, KeyError, OverflowError)  # exceptions of failed conversions


def parse_value(key: str, value: Any, annotation: Any, origin: str) -> Any:
    """Convert a value to a type; a UserError names the allowed values.

    A number of an agent may be a schedule, such as ``linear(0.2, 0.05)``.
    """
    if ".agent." in f".{key}" and float in (annotation, *union_members(annotation)):
        if isinstance(value, Schedule):
            return value
        if isinstance(value, str) and ("(" in value or value.strip() in (*KINDS, *RETURN_KINDS)):
            return parse_schedule(key, value)
    try:
        return _convert(value, annotation)
    except FAILURES:
        hint = did_you_mean(str(value), map(str, _choices(annotation)))
        raise UserError(
            f'{key} is "{format_value(value)}" ({origin}), but must be {describe_type(annotation)}.{hint}'
        ) from None


def parse_schedule(key: str, text: str) -> Schedule:
    """Read a schedule; a UserError says what is wrong."""
    kind = text.partition("(")[0].strip()
    known = (*KINDS, *RETURN_KINDS)
    if kind not in known:
        raise UserError(
            f'{key} is "{text}", but there is no schedule "{kind}"; there are {", ".join(known)}.'
            f"{did_you_mean(kind, known)}"
        )
    try:
        return read_schedule(text)
    except ValueError as error:
        raise UserError(f'{key} is "{text}", but {error}; write it like {example(kind)}.') from None


def format_value(value: Any) -> str:
    """Format a value as on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def describe_type(annotation: Any) -> str:
    """Describe the allowed values of a type in words."""
    if choices := _choices(annotation):
        return "one of " + ", ".join(map(str, choices))
    if members := union_members(annotation):
        return " or ".join("None" if m is NoneType else describe_type(m) for m in members)
    if get_origin(annotation) is tuple:
        return f"a list, each item {describe_type(get_args(annotation)[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return words.get(annotation, str(annotation))


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; empty for any other type."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()


def _choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _convert(value: Any, annotation: Any) -> Any:
    if members := union_members(annotation):
        if NoneType in members and value in (None, "None", "none"):
            return None
        for member in (m for m in members if m is not NoneType):
            with suppress(*FAILURES):
                return _convert(value, member)
        raise ValueError(value)
    if choices := _choices(annotation):
        return choices[choices.index(value)]
    if get_origin(annotation) is tuple:
        items = [value] if isinstance(value, str | int | float) else list(value)
        return tuple(_convert(item, get_args(annotation)[0]) for item in items)
    if annotation in (int, float):
        return _number(value, annotation)
    if annotation is bool:
        return value if isinstance(value, bool) else BOOLEANS[str(value)]
    if annotation is str and not isinstance(value, str):
        raise ValueError(value)
    return value


def _number(value: Any, kind: type[int] | type[float]) -> int | float:
    """Parse a number; integers may be written as 1e6 or 1_000_000 and are never rounded; booleans are refused."""
    if isinstance(value, bool):
        raise ValueError(value)
    if kind is int and isinstance(value, str) and "e" not in value.lower():
        whole = int(value)
    else:
        number = float(value)
        if math.isnan(number) or (kind is int and number != int(number)):
            raise ValueError(value)
        if kind is float:
            return number
        whole = int(number if isinstance(value, str) else value)
    if abs(whole) >= INTEGER_LIMIT:
        raise ValueError(value)
    return whole
