"""UserError, for mistakes that a user can fix, and Stop, by which a hook ends a run."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from ludus.core.text import printable

NEAR = 0.65  # likeness of two names (0 to 1) from which one may be a slip for the other
TOO_MANY_FILES = (
    "This process cannot open more files: raise the limit with `ulimit -n 4096`, or lower env.num, env.workers or "
    "evaluation.episodes."
)


class UserError(Exception):
    """A mistake of the user's: one sentence that names the thing, the value and the fix.

    The command line prints it without a traceback and exits with code 2. ``details`` are lines to show before it: the
    stack of the user's own code, where that raised.
    """

    details: str = ""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Stop(Exception):
    """Raise this in ``on_update`` to end the run after this update, all saved; its message becomes the reason."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``' Did you mean "x"?'`` for the known name nearest to ``name``, else an empty string."""
    names = list(known)
    if len(name.strip("-:. ")) < 2:  # anything would be near
        return ""
    short = [k for k in names if _abbreviates(name, k, True)] or [k for k in names if _abbreviates(name, k, False)]
    if short:
        found = difflib.get_close_matches(name, short, n=1, cutoff=0)
    else:
        found = difflib.get_close_matches(name, [k for k in names if _is_near(name, k)], n=1, cutoff=0)
    if not found:  # wrong case, or a piece of a longer name
        given, pairs = name.lower().lstrip("-"), [(k, k.lower().lstrip("-")) for k in names]
        found = [k for k, bare in pairs if _is_piece(given, bare) or _is_piece(bare, given)][:1]
    return f' Did you mean "{found[0]}"?' if found else ""


def _is_near(name: str, known: str) -> bool:
    """Whether two names are alike, their last parts too: dashes in front and a common group alone do not count."""
    pairs = [(name.lstrip("-"), known.lstrip("-")), (name.rpartition(".")[2], known.rpartition(".")[2])]
    return all(difflib.SequenceMatcher(None, a, b).ratio() >= NEAR for a, b in pairs)


def _is_piece(piece: str, whole: str) -> bool:
    """Whether one name lies in another, and is not just its group."""
    return len(piece) > 1 and piece in whole and not whole.startswith(f"{piece}.")


def _abbreviates(name: str, known: str, whole: bool) -> bool:
    """Whether ``name`` is short for ``known``, or for what lies in its group: ``lr`` for ``agent.learning_rate``."""
    short, long = _words(name), _words(known)
    return _shortens(short, long, whole) or ("." in known and _shortens(short, long[1:], whole))


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.lower())


def _shortens(short: list[str], long: list[str], whole: bool) -> bool:
    """Whether each word of ``short`` begins a word of ``long`` or has initials of some, in order; ``whole``: of all."""
    if not short or not long:
        return not short and not (long and whole)
    size = len(short[0])
    initials = size > 1 and [word[0] for word in long[:size]] == list(short[0])
    begins = long[0].startswith(short[0]) and _shortens(short[1:], long[1:], whole)
    return begins or (initials and _shortens(short[1:], long[size:], whole))


def check_ranges(config: Any, **limits: tuple[str, ...]) -> None:
    """Refuse settings of an agent outside of what they can be, by kind of limit: ``share``, ``positive``, ``natural``.

    ``share`` is 0 to 1, ``natural`` 0 or more; all must be finite, and a kind may name fields that a config lacks.
    """
    kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
        "fraction": (lambda x: 0 <= x <= 1, "lie between 0 and 1"),
        "positive": (lambda x: x > 0, "be greater than 0"),
        "nonnegative": (lambda x: x >= 0, "not be negative"),
        "finite": (lambda x: True, ""),
    }
    for kind, names in limits.items():
        allowed, must = kinds[kind]
        for name, value in ((name, getattr(config, name)) for name in names if hasattr(config, name)):
            if not math.isfinite(value):
                raise UserError(f"agent.{name} is {value}; it must be a finite number.")
            if not allowed(value):
                raise UserError(f"agent.{name} is {value}; it must {must}.")
