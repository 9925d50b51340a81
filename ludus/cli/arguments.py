"""Parse command-line arguments by the type annotations of dataclasses, with the same checks as settings files."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ludus.cli.help import show_help
from ludus.core.errors import UserError, did_you_mean
from ludus.settings.parse import describe_type, parse_value

T = TypeVar("T")
SINGULAR = {"tags": "tag"}  # --tag may be repeated, and each adds one word to the list


class Flag(NamedTuple):
    """The setting behind a flag."""

    key: str
    annotation: Any
    switch: bool | None = None  # for bools: the value that the flag sets
    repeats: bool = False  # takes one word and adds it to the list


class UnknownFlag(UserError):
    """A flag that the command does not have."""

    def __init__(self, flag: str, hint: str) -> None:
        super().__init__(f"Unknown flag {flag}.{hint}")
        self.flag = flag
        self.key = flag.lstrip("-").replace("-", "_")  # of the setting


def parse(arguments: type[T], argv: list[str], command: str) -> T:
    """Parse ``argv`` into a dataclass; its first field is the positional argument (a tuple: all of them)."""
    if wants_help(argv):
        show_help(arguments, command)
    types = get_type_hints(arguments)
    first, *rest = fields(arguments)  # type: ignore[arg-type]
    words, values, unknown = read_words(argv, known_flags({f.name: types[f.name] for f in rest}))
    if unknown is not None:
        raise unknown
    if get_origin(types[first.name]) is tuple and words:
        values[first.name] = words
    elif word := single_positional(words, command):
        values[first.name] = word
    elif first.default is MISSING:
        refuse_missing_positional(values, command)
        raise UserError(f"`ludus {command}` needs a {first.name}: see `ludus {command} --help`.")
    return arguments(**{name: parse_value(name, value, types[name], "argument") for name, value in values.items()})


def wants_help(argv: list[str]) -> bool:
    """Whether the arguments ask for help."""
    return "--help" in argv or "-h" in argv


def known_flags(types: Mapping[str, Any]) -> dict[str, Flag]:
    """Return the flags of settings: ``agent.learning_rate`` is set by ``--agent.learning-rate``."""
    flags: dict[str, Flag] = {}
    for key, annotation in types.items():
        place, dot, name = key.rpartition(".")
        if annotation is bool:
            flags[flag_of(key)] = Flag(key, annotation, True)
            flags[flag_of(f"{place}{dot}no_{name}")] = Flag(key, annotation, False)
        else:
            flags[flag_of(key)] = Flag(key, annotation)
        if key in SINGULAR:
            flags[flag_of(SINGULAR[key])] = Flag(key, str, repeats=True)
    return flags


def flag_of(key: str) -> str:
    """Return the flag that sets a key."""
    return "--" + key.replace("_", "-")


def read_words(argv: list[str], flags: Mapping[str, Flag]) -> tuple[list[str], dict[str, Any], UnknownFlag | None]:
    """Separate positional arguments from the values of flags; also return the first unknown flag, to be raised."""
    left, positional = deque(argv), []
    values: dict[str, Any] = {}
    unknown: UnknownFlag | None = None
    while left:
        word = left.popleft()
        if not _is_flag(word):
            positional.append(word)
            continue
        name, equals, attached = word.partition("=")
        flag = flags.get(name.replace("_", "-"))
        if equals:
            left.appendleft(attached)
        if flag is None:
            unknown = unknown or UnknownFlag(name, did_you_mean(name, flags) or " See --help.")
            _take_list(left, float if left and _fits(left[0], float) else str)  # probably its values
            continue
        taken = _take_value(name, flag, left, bool(equals))
        values[flag.key] = [*values.get(flag.key, []), taken] if flag.repeats else taken
    return positional, values, unknown


def refuse_missing_positional(values: Mapping[str, Any], command: str) -> None:
    """Raise if a list flag has probably taken the missing positional argument."""
    for key, value in values.items():
        if isinstance(value, list) and value and "=" not in value[-1] and not _fits(value[-1], float):
            raise UserError(
                f'`ludus {command}` needs a positional argument, but "{value[-1]}" was read as a value of '
                f"{flag_of(key)}: put it before the flag."
            )


def single_positional(words: list[str], command: str, values: Mapping[str, Any] | None = None) -> str | None:
    """Return the positional argument, or None; ``values`` are those of the flags."""
    if len(words) > 1:
        lists = "".join(
            f" Give several {key} as {flag_of(key)} a b, or as {flag_of(one)} a {flag_of(one)} b."
            for key, one in SINGULAR.items()
            if key in (values or {})
        )
        raise UserError(
            f'`ludus {command}` takes one positional argument, but got "{words[0]}" and "{words[1]}".{lists}'
        )
    return words[0] if words else None


def _take_value(name: str, flag: Flag, left: deque[str], attached: bool) -> Any:
    if flag.switch is not None:
        if attached:
            raise UserError(f'{name} takes no value, but got "{left[0]}".')
        return flag.switch
    if get_origin(flag.annotation) is tuple:
        return _take_list(left, get_args(flag.annotation)[0])
    if not left or (_is_flag(left[0]) and not attached):
        raise UserError(f"{name} needs a value: {describe_type(flag.annotation)}.")
    return left.popleft()


def _take_list(left: deque[str], element: Any) -> list[str]:
    """Take words up to the next flag, or up to one of another type: --network.hidden 64 64 CartPole-v1."""
    taken: list[str] = []
    while left and not _is_flag(left[0]) and (not taken or _fits(left[0], element)):
        taken.append(left.popleft())
    return taken


def _fits(word: str, annotation: Any) -> bool:
    try:
        parse_value("", word, annotation, "")
    except UserError:
        return False
    return True


def _is_flag(word: str) -> bool:
    """Whether a word is a flag rather than a negative number."""
    return word.startswith("-") and not word[1:].replace(".", "", 1).replace("e", "", 1).replace("-", "", 1).isdigit()
