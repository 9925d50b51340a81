"""Errors for the user, and helpers for their messages."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ludus.core.schedule import Schedule
from ludus.core.text import printable

SIMILARITY = 0.65  # ratio of difflib from which a name may be a misspelling of another
TOO_MANY_FILES = (
    "This process cannot open more files: raise the limit with `ulimit -n 4096`, or lower env.num, env.workers or "
    "evaluation.episodes."
)


class UserError(Exception):
    """A mistake that the user can fix; the message names the setting, its value and the fix.

    The command line prints it without a traceback and exits with code 2.
    """

    details: str = ""  # lines to print before the message: the traceback of the user's code

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Stop(Exception):
    """Raise this in ``on_update`` to stop the run and save it; the message is logged as the reason."""


@contextmanager
def naming_role(role: str) -> Iterator[None]:
    """Let errors about ``agent.*`` and ``network.*`` name the settings of a role, as in ``roles.prey.agent.gamma``."""
    try:
        yield
    except UserError as error:
        error.args = (re.sub(r"(?<![\w.])(?=(agent|network)\.[a-z])", f"roles.{role}.", str(error)),)
        raise


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``' Did you mean "x"?'`` for the known name most similar to ``name``, or an empty string."""
    names = list(known)
    if len(name.strip("-:. ")) < 2:
        return ""
    candidates = (
        [k for k in names if _abbreviates(name, k, whole=True)]
        or [k for k in names if _abbreviates(name, k, whole=False)]
        or [k for k in names if _is_similar(name, k)]
    )
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0)
    found = found or [k for k in names if _is_part(name, k) or _is_part(k, name)]
    return f' Did you mean "{found[0]}"?' if found else ""


def _is_similar(name: str, known: str) -> bool:
    """Compare the whole names and their last parts: a common prefix such as ``--agent.`` is not enough."""
    pairs = [(name.lstrip("-"), known.lstrip("-")), (name.rpartition(".")[2], known.rpartition(".")[2])]
    return all(difflib.SequenceMatcher(None, a, b).ratio() >= SIMILARITY for a, b in pairs)


def _is_part(part: str, whole: str) -> bool:
    part, whole = part.lower().lstrip("-"), whole.lower().lstrip("-")
    return len(part) > 1 and part in whole and not whole.startswith(f"{part}.")


def _abbreviates(name: str, known: str, whole: bool) -> bool:
    """Return whether ``name`` is short for ``known``, with or without its group: ``lr``, ``agent.learning_rate``."""
    short, long = (re.findall(r"[^\W_]+", x.lower()) for x in (name, known))
    return _match_words(short, long, whole) or ("." in known and _match_words(short, long[1:], whole))


def _match_words(short: list[str], long: list[str], whole: bool) -> bool:
    """Match each word of ``short`` to the start of a word or to initials; ``whole``: all of ``long`` is used."""
    if not short or not long:
        return not short and not (long and whole)
    size = len(short[0])
    initials = size > 1 and [word[0] for word in long[:size]] == list(short[0])
    prefix = long[0].startswith(short[0]) and _match_words(short[1:], long[1:], whole)
    return prefix or (initials and _match_words(short[1:], long[size:], whole))


def check_ranges(config: Any, **limits: tuple[str, ...]) -> None:
    """Raise a UserError for agent settings out of range: ``fraction``, ``positive``, ``nonnegative`` or ``finite``.

    Of a schedule all values must be in range, but a learning rate and PPO's clip range may reach 0.
    """
    kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
        "fraction": (lambda x: 0 <= x <= 1, "between 0 and 1"),
        "positive": (lambda x: x > 0, "greater than 0"),
        "nonnegative": (lambda x: x >= 0, "0 or greater"),
        "finite": (lambda x: True, ""),
    }
    for kind, names in limits.items():
        in_range, expected = kinds[kind]
        for name in names:
            value = getattr(config, name)
            if not math.isfinite(value):
                raise UserError(f"agent.{name} is {value}; it must be a finite number.")
            if not isinstance(value, Schedule):
                if not in_range(value):
                    raise UserError(f"agent.{name} is {value}; it must be {expected}.")
                continue
            may_be_0 = value.high > 0 and (name == "clip" or name.endswith("learning_rate"))
            for reached in (value.low, value.high):
                if not in_range(reached) and not (reached == 0 and may_be_0):
                    raise UserError(f"agent.{name} is {value}, which reaches {reached:g}; it must be {expected}.")
