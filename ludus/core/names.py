"""From a name on the command line to a class and back: the one place where that happens.

``ppo`` is looked up in the table of the package that asks; ``my_pkg.mod:MyAgent`` is imported as it
stands. Every process, local or remote, resolves the same string to the same class, so nothing is ever pickled.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial, reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from ludus.core.errors import UserError, nearest

MAIN = "__main__"
_given: dict[str, Any] = {}  # what was given from Python and no import finds, by the name that settings have for it
_importing: list[str] = []  # modules that are imported just now
INSTALLED = ("ludus", "gymnasium")  # packages that are never looked for in the current folder


def resolve(name: str, known: Mapping[str, str], kind: str) -> Any:
    """Return the object behind ``name``: a key of ``known`` (whose value is ``module:name``) or such a path itself."""
    if name in _given:
        return _given[name]
    path = known.get(name, name)
    if ":" not in path:
        listed = ", ".join(sorted(known))
        raise UserError(
            f'Unknown {kind} "{name}".{nearest(name, known)} Known: {listed}; or give your own as package.module:Class.'
        )
    module_name, _, attribute = path.partition(":")
    if "" not in sys.path and module_name.partition(".")[0] not in INSTALLED:
        sys.path.insert(0, "")  # a user's own module lies in the folder where the command is typed
    if "<" in attribute:
        raise _nameless(name, kind)
    try:
        module = _import(module_name)
    except ImportError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise UserError(
                f'{kind} "{name}": module {module_name} needs {error.name}, which is not installed.'
            ) from error
        raise UserError(
            f'{kind} "{name}": there is no module {module_name} to import; run the command in the folder that has it, '
            "or install it."
        ) from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        if module_name == MAIN:
            raise _nameless(name, kind) from error
        own = [key for key, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__]
        has = f"name what it has: {', '.join(own)}" if own else "define it there, or name another module"
        hint = nearest(attribute, vars(module))
        raise UserError(
            f'{kind} "{name}": module {module_name} has no {attribute}{f".{hint}" if hint else f"; {has}."}'
        ) from error


def path_of(thing: Callable[..., Any], known: Mapping[str, str]) -> str:
    """Return the name of a class or function in settings: its key in ``known``, else ``module:QualName``.

    What no import would find again (a lambda, a partial, a class defined in a function) gets a name with ``<`` in it,
    which ``resolve`` understands in this process alone.
    """
    path = import_path(thing)
    if short := next((name for name, place in known.items() if place == path), ""):
        return short
    if importable(path, thing):
        return path
    path = path if "<" in path else f"{path}.<local>"
    name, count = path, 1
    while _given.get(name, thing) is not thing:  # another one of the same name
        count += 1
        name = f"{path}.<{count}>"
    _given[name] = thing
    return name


def importable(path: str, thing: Any) -> bool:
    """Whether an import by ``path`` gives ``thing``."""
    if "<" in path:
        return False
    try:
        return resolve(path, {}, "class") is thing
    except UserError:
        return False


def import_path(thing: Callable[..., Any]) -> str:
    """``module:name`` of a class or function; of a partial, the name of what it calls, marked as no more than that."""
    if isinstance(thing, partial):
        return f"{import_path(thing.func)}.<partial>"
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    module = main_name() if kind.__module__ == MAIN else kind.__module__
    return f"{module}:{kind.__qualname__}"


def found_by_others(path: str) -> bool:
    """Whether another process can import ``path``, as far as its name tells."""
    return "<" not in path and not path.startswith(f"{MAIN}:")


def _nameless(name: str, kind: str) -> UserError:
    argument = {"agent": "agent=", "network": "network=", "wrapper": "wrappers=", "environment": "environment="}.get(
        kind
    )
    give = f", or give it from Python, as in ludus.load(run, {argument}…)" if argument else ""
    return UserError(
        f'{kind} "{name}" was defined in a function, a notebook or at a prompt, so it cannot be imported by that name; '
        f"define it at the top of a module{give}."
    )


def main_name() -> str:
    """The name under which the script or module that runs can be imported."""
    main = sys.modules[MAIN]
    spec = getattr(main, "__spec__", None)  # there is one with python -m
    return spec.name if spec is not None else Path(getattr(main, "__file__", None) or MAIN).stem


def refuse_while_importing(call: str) -> None:
    """Refuse to train in a module that is only imported to find a class in it."""
    if _importing:
        raise UserError(
            f"The module {_importing[-1]} is imported to find a class in it, and calls {call} meanwhile, which would "
            'train again; put that call under `if __name__ == "__main__":`.'
        )


def _import(module_name: str) -> ModuleType:
    if module_name == main_name():
        return sys.modules[MAIN]  # importing it would run it again
    _importing.append(module_name)
    try:
        return importlib.import_module(module_name)
    finally:
        _importing.pop()
