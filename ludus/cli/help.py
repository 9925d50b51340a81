"""What ``--help`` prints: tyro draws it from the dataclasses; here is how types and defaults are put into words."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from types import NoneType
from typing import Any, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from ludus.settings.parse import union_members

WORDS = {str: "TEXT", int: "INT", float: "FLOAT"}
NOTHING = "none"  # how an empty text, an empty list and None are shown


def show_help(arguments: Any, command: str, description: str = "", default: Any = None) -> None:
    """Print the help of a dataclass and leave, as tyro does."""
    given = {} if default is None else {"default": default}
    width = shutil.get_terminal_size().columns
    paragraphs = inspect.cleandoc(description or arguments.__doc__).split("\n\n")
    lines = [textwrap.fill(part, width, subsequent_indent="  ") for part in paragraphs]  # tyro joins unindented lines
    tyro.cli(
        arguments,
        prog=f"ludus {command}",
        description="\n\n".join(lines),
        args=["--help"],
        registry=_wording(),
        **given,
    )


def _wording() -> ConstructorRegistry:
    """Tyro's types with names of our own; for help alone, as ``arguments`` reads the words."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def word(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if get_origin(info.type) is tuple:
            (item, *_) = get_args(info.type)
            return _spec(f"[{WORDS[item]} ...]", "*") if item in WORDS else None
        members = [member for member in union_members(info.type) if member is not NoneType] or [info.type]
        return _spec(WORDS[members[0]], 1) if len(members) == 1 and members[0] in WORDS else None

    return registry


def _spec(metavar: str, count: Any) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=count,
        metavar=metavar,
        instance_from_str=lambda words: words,
        is_instance=lambda value: True,
        str_from_instance=_shown,
    )


def _shown(value: Any) -> list[str]:
    items = list(value) if isinstance(value, tuple | list) else [value]
    return [NOTHING if item in ("", None) else str(item) for item in items] or [NOTHING]
