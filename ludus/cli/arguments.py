"""Parse command-line words into values by the annotations of dataclasses.

Words are read with the same checks as settings files, so a mistake reads the same wherever it was made: one sentence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ludus.cli.help import show_help
from ludus.core.errors import UserError, did_you_mean
from ludus.settings.parse import describe_type, parse_value

T = TypeVar("T")
SINGULAR = {"tags": "tag"}  # lists that a flag of this name adds to, one word each time


class Flag(NamedTuple):
    """What a flag sets."""

    key: str
    annotation: Any
    switch: bool | None = None  # for true-or-false settings: the value that the flag itself stands for
    repeats: bool = False  # takes one word, and adds it to the list each time that it is given


class UnknownFlag(UserError):
    """A flag that the command does not have."""

    def __init__(self, flag: str, hint: str) -> None:
        super().__init__(f"Unknown flag {flag}.{hint}")
        self.flag = flag
        self.key = flag.lstrip("-").replace("-", "_")  # of the setting that it would set


def parse(arguments: type[T], argv: list[str], command: str) -> T:
    """Read ``argv`` into a dataclass whose first field is the word without a flag (a tuple: all such words)."""
    if wants_help(argv):
        show_help(arguments, command)
    types = get_type_hints(arguments)
    first, *rest = fields(arguments)  # type: ignore[arg-type]
    words, values = read_words(argv, known_flags({f.name: types[f.name] for f in rest}))
    if get_origin(types[first.name]) is tuple and words:
        values[first.name] = words
    elif word := only_word(words, command):
        values[first.name] = word
    elif first.default is MISSING:
        raise needs_word(values, command, first.name)
    return arguments(**{name: parse_value(name, value, types[name], "argument") for name, value in values.items()})


def wants_help(argv: list[str]) -> bool:
    """Whether help is asked for."""
    return "--help" in argv or "-h" in argv


def known_flags(types: Mapping[str, Any]) -> dict[str, Flag]:
    """The flags of settings by their dotted keys: ``agent.learning_rate`` is set by ``--agent.learning-rate``."""
    flags: dict[str, Flag] = {}
    for key, annotation in types.items():
        place, dot, name = key.rpartition(".")
        if annotation is bool:
            flags[spell(key)] = Flag(key, annotation, True)
            flags[spell(f"{place}{dot}no_{name}")] = Flag(key, annotation, False)
        else:
            flags[spell(key)] = Flag(key, annotation)
        if key in SINGULAR:
            flags[spell(SINGULAR[key])] = Flag(key, str, repeats=True)
    return flags


def spell(key: str) -> str:
    """The flag of a key."""
    return "--" + key.replace("_", "-")


def read_words(argv: list[str], flags: Mapping[str, Flag]) -> tuple[list[str], dict[str, Any]]:
    """Separate positional words from the values of flags."""
    left, alone = deque(argv), []
    values: dict[str, Any] = {}
    while left:
        word = left.popleft()
        if not _is_flag(word):
            alone.append(word)
            continue
        name, equals, attached = word.partition("=")
        flag = flags.get(name.replace("_", "-"))
        if flag is None:
            raise UnknownFlag(name, did_you_mean(name, flags) or " `--help` shows all.")
        if equals:
            left.appendleft(attached)
        taken = _take(name, flag, left, bool(equals))
        values[flag.key] = [*values.get(flag.key, []), taken] if flag.repeats else taken
    return alone, values


def refuse_swallowed(values: Mapping[str, Any], command: str) -> None:
    """Say so where a list flag has taken the missing positional argument."""
    for key, value in values.items():
        if isinstance(value, list) and value and "=" not in value[-1] and not _fits(value[-1], float):
            raise UserError(
                f'`ludus {command}` lacks its first word: "{value[-1]}" was taken as one of {spell(key)}; put the word '
                "without a flag before it."
            )


def needs_word(values: Mapping[str, Any], command: str, name: str) -> UserError:
    """The error for a command that lacks its positional argument."""
    refuse_swallowed(values, command)
    return UserError(f"`ludus {command}` needs a {name}: `ludus {command} --help` shows how to give one.")


def only_word(words: list[str], command: str, values: Mapping[str, Any] | None = None) -> str | None:
    """The one word that a command takes without a flag, if it is there; ``values`` are those that flags have set."""
    if len(words) > 1:
        lists = "".join(
            f" Several {key} are given as {spell(key)} a b, or as {spell(one)} a {spell(one)} b."
            for key, one in SINGULAR.items()
            if key in (values or {})
        )
        raise UserError(
            f'`ludus {command}` takes one word without a flag, but "{words[1]}" came after "{words[0]}".{lists}'
        )
    return words[0] if words else None


def _take(name: str, flag: Flag, left: deque[str], attached: bool) -> Any:
    if flag.switch is not None:
        if attached:
            raise UserError(f'{name} takes no value, but got "{left[0]}"; leave the value out.')
        return flag.switch
    if get_origin(flag.annotation) is tuple:
        return _take_list(get_args(flag.annotation)[0], left)
    if not left or (_is_flag(left[0]) and not attached):
        raise UserError(f"{name} needs a value: {describe_type(flag.annotation)}.")
    return left.popleft()


def _take_list(item: Any, left: deque[str]) -> list[str]:
    """The words up to the next flag, or up to one that does not fit: ``--network.hidden 64 64 CartPole-v1``."""
    taken: list[str] = []
    while left and not _is_flag(left[0]):
        if taken and not _fits(left[0], item):
            break
        taken.append(left.popleft())
    return taken


def _fits(word: str, annotation: Any) -> bool:
    try:
        parse_value("", word, annotation, "")
    except UserError:
        return False
    return True


def _is_flag(word: str) -> bool:
    """Whether a word is a flag, and not a negative number."""
    return word.startswith("-") and not word[1:].replace(".", "", 1).replace("e", "", 1).replace("-", "", 1).isdigit()
