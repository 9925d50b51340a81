"""Print the help of a command: the fields of a dataclass with their types, defaults and comments."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from rich.panel import Panel
from rich.text import Text

from ludus.logging.terminal import Console
from ludus.settings.parse import union_members

WORDS = {str: "TEXT", int: "INT", float: "FLOAT"}
NOTHING = "none"  # shown for an empty string, an empty list and None
INDENT = 26  # maximum columns of flags to the left of their text
RENAMED = {"agent_name": "agent"}  # flags with another name than their field


class Entry(NamedTuple):
    """A flag and its help text."""

    flag: str  # with its value: --seed INT
    text: str


class Group(NamedTuple):
    """The flags of one dataclass."""

    title: str
    about: str
    entries: list[Entry]


def show_help(arguments: Any, command: str) -> NoReturn:
    """Print the help of a dataclass, or of an instance with the defaults, and exit.

    The first field is the positional argument. A field that is a dataclass is a group of dotted flags; the flags of one
    called ``settings`` have no prefix.
    """
    kind = _class(arguments)
    first, *_ = fields(kind)
    value = _value(arguments, first)
    default = "(required)" if value in (MISSING, "", ()) else _default(value)
    word = Entry(
        _metavar(get_type_hints(kind, include_extras=True)[first.name]), f"{comments(kind)[first.name]} {default}"
    )
    groups = [Group("options", "", [Entry("-h, --help", "show this help and exit")])]
    _collect(arguments, "", groups, skip=first.name)
    width = shutil.get_terminal_size().columns
    console = Console(width=width)
    name = word.flag.partition(" ")[0]
    console.print(Text(f"usage: ludus {command} [-h] [OPTIONS] {name}\n", style="bold"))
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        console.print(Text(textwrap.fill(" ".join(paragraph.split()), width) + "\n"))
    longest = max(len(entry.flag) for group in groups for entry in (word, *group.entries))
    for group in (Group("argument", "", [word]), *groups):
        console.print(_panel(group, min(INDENT, longest + 2), width))
    raise SystemExit(0)


def _collect(given: Any, prefix: str, groups: list[Group], skip: str = "") -> None:
    """Add the flags of a dataclass to the last group, and a group for each nested dataclass."""
    kind, here = _class(given), groups[-1].entries
    hints, texts = get_type_hints(kind, include_extras=True), comments(kind)
    values = {field.name: _value(given, field) for field in fields(kind) if field.name != skip}
    for name, value in values.items():
        if not is_dataclass(value) and not isinstance(value, Mapping):  # per-network flags are not listed
            flag = f"--{prefix}{RENAMED.get(name, name)}".replace("_", "-")
            shown = f"{flag} {_metavar(hints[name])}"
            if hints[name] is bool:
                start, dot, last = flag.removeprefix("--").rpartition(".")
                shown = f"{flag}, --{start}{dot}no-{last}"
            here.append(Entry(shown, f"{texts.get(name, '')} {_default(value)}".strip()))
    for name, value in values.items():
        if name == "settings":
            _collect(value, "", groups)
        elif is_dataclass(value):
            groups.append(Group(f"{name} options", inspect.cleandoc(value.__doc__ or "").split("\n\n")[0], []))
            _collect(value, f"{prefix}{name}.", groups)


def _class(given: Any) -> Any:
    return given if inspect.isclass(given) else type(given)


def _value(given: Any, field: Any) -> Any:
    if not inspect.isclass(given):
        return getattr(given, field.name)
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return str(get_args(annotation)[1])
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if get_origin(annotation) is tuple:
        return f"[{_metavar(get_args(annotation)[0])} ...]"
    members = [member for member in union_members(annotation) if member is not NoneType]
    return _metavar(members[0]) if members else WORDS.get(annotation, "VALUE")


def _default(value: Any) -> str:
    items = list(value) if isinstance(value, tuple | list) else [value]
    shown = [NOTHING if item in ("", None) else str(item) for item in items] or [NOTHING]
    return f"(default: {' '.join(shown)})"


def comments(kind: type[Any]) -> dict[str, str]:
    """Return the comment of each field of a dataclass: on its last line, else on the lines above it."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except (OSError, TypeError):  # without a source file
            continue
        lines, body = source.splitlines(), ast.parse(source).body[0]
        for node in body.body if isinstance(body, ast.ClassDef) else ():
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            last = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset or 0 :].decode().strip()
            above: list[str] = []
            while (line := lines[node.lineno - 2 - len(above)].strip()).startswith("#"):
                above.insert(0, line)
            words = [last] if last.startswith("#") and not last.startswith("# type:") else above
            found[node.target.id] = " ".join(word.lstrip("# ") for word in words)
    return found


def _panel(group: Group, indent: int, width: int) -> Panel:
    room = width - 4  # without the border
    text = Text()
    if group.about:
        text.append(textwrap.fill(" ".join(group.about.split()), room) + "\n" + "─" * room + "\n")
    for flag, words in group.entries:
        text.append(flag, style="bold")
        text.append("\n" + " " * indent if len(flag) + 2 > indent else " " * (indent - len(flag)))
        text.append(f"\n{' ' * indent}".join(textwrap.wrap(words, room - indent, break_long_words=False)) + "\n")
    text.rstrip()
    return Panel(text, title=group.title, title_align="left", width=width)
