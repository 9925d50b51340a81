"""Types of the arguments of a call in the settings, such as ``size`` of ``lstm(size=128)``, and their check."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class Range(NamedTuple):
    """Numbers from ``low`` to below ``high``, and how a message calls them."""

    low: float
    high: float
    text: str


Size = Annotated[int, Range(1, inf, "a whole number of 1 or more")]
Sizes = tuple[Size, ...]
Fraction = Annotated[float, Range(0, 1, "0 or more and less than 1")]

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


def argument_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function, or of the constructor of a class."""
    try:
        return get_type_hints(function.__init__ if isinstance(function, type) else function, include_extras=True)  # type: ignore[misc]
    except NameError:  # the user's, with a name that is imported for type checkers only
        return {}


def mismatch(value: Any, hint: Any) -> str:
    """Return what a value of this type is called, or "" if the value has the type; unknown types are not checked."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(limits := parts[1], Range):
        return "" if not mismatch(value, parts[0]) and limits.low <= value < limits.high else limits.text
    if origin in (Union, UnionType):
        expected = [mismatch(value, part) for part in parts if part is not NoneType]
        return "" if "" in expected else " or ".join(expected)
    if origin is Literal:
        return "" if value in parts else f"{'one of ' * (len(parts) > 1)}{', '.join(map(str, parts))}"
    if origin is tuple:
        item = next(filter(None, (mismatch(v, parts[0]) for v in value)), "") if isinstance(value, tuple) else "any"
        return item and f"a list such as [64, 64]{'' if item == 'any' else f', each {item}'}"
    if hint not in _NAMES:
        return ""
    fits = isinstance(value, int | float if hint is float else hint) and (hint is bool or not isinstance(value, bool))
    return "" if fits else _NAMES[hint]
