"""From a name on the command line to a class and back: the one place where that happens.

``ppo`` is looked up in the table of the package that asks; ``my_pkg.mod:MyAgent`` is imported as it
stands. Every process, local or remote, resolves the same string to the same class, so nothing is ever pickled.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, reduce
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ludus.core.errors import UserError, did_you_mean

MAIN = "__main__"
_given: dict[str, Any] = {}  # what was given from Python and no import finds, by the name that settings have for it
_folders: dict[str, str | None] = {}  # where modules are looked for; "" or none given: the current folder
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
            f'Unknown {kind} "{name}".{did_you_mean(name, known)} Choose one of {listed}, or give your own as '
            "package.module:Class."
        )
    module_name, _, attribute = path.partition(":")
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
        hint = did_you_mean(attribute, vars(module))
        raise UserError(
            f'{kind} "{name}": module {module_name} has no {attribute}{f".{hint}" if hint else f"; {has}."}'
        ) from error


def name_for(thing: Callable[..., Any], known: Mapping[str, str]) -> str:
    """Return the name of a class or function in settings: its key in ``known``, else ``module:QualName``.

    What no import would find again (a lambda, a partial, a class defined in a function) gets a name with ``<`` in it,
    which ``resolve`` understands in this process alone.
    """
    path = import_path(thing)
    if short := next((name for name, place in known.items() if place == path), ""):
        return short
    if is_importable(path, thing):
        return path
    path = path if "<" in path else f"{path}.<local>"
    name, count = path, 1
    while _given.get(name, thing) is not thing:  # another one of the same name
        count += 1
        name = f"{path}.<{count}>"
    _given[name] = thing
    return name


def is_importable(path: str, thing: Any) -> bool:
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


def is_importable_elsewhere(path: str) -> bool:
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


def check_not_importing(call: str) -> None:
    """Refuse to train in a module that is only imported to find a class in it."""
    if _importing:
        raise UserError(
            f"The module {_importing[-1]} is imported to find a class in it, and calls {call} meanwhile, which would "
            'train again; put that call under `if __name__ == "__main__":`.'
        )


def set_search_folders(folders: Mapping[str, str | None]) -> None:
    """Look for modules, by the first part of their names, first in these folders from now on.

    An empty one stands for the current folder, as without this call; None for no folder but those of ``sys.path``.
    """
    _folders.update(folders)


def search_folders() -> dict[str, str | None]:
    """Return what ``set_search_folders`` was told, for another process."""
    return dict(_folders)


def top_package(path: str) -> str:
    """Return the first part of the module's name in ``package.module:Class``."""
    return path.partition(":")[0].partition(".")[0].strip()


def has_module(folder: str, top: str) -> bool:
    """Whether the module lies in this folder; nothing is imported."""
    return os.path.isabs(folder) and PathFinder.find_spec(top, [folder]) is not None


def is_found_without_cwd(top: str) -> bool:
    """Whether a module is imported already, or found without a look into the current folder for it."""
    if top in sys.modules or top == main_name() or PathFinder.find_spec(top, [path for path in sys.path if path]):
        return True
    others = (finder for finder in sys.meta_path if finder is not PathFinder)  # of packages installed with pip -e
    return any(finder.find_spec(top, None) is not None for finder in others)


def source_folder(top: str) -> str:
    """Return the folder that a module of the user's own is imported from; empty for one that is installed."""
    module = sys.modules[MAIN] if top == main_name() else sys.modules.get(top)
    spec = PathFinder.find_spec(top, [_folders.get(top) or os.getcwd(), *sys.path]) if module is None else None
    packages = list(getattr(module, "__path__", None) or getattr(spec, "submodule_search_locations", None) or ())
    file = packages[0] if packages else getattr(module, "__file__", None) or getattr(spec, "origin", None)
    folder = os.path.dirname(os.path.abspath(file)) if file and os.path.exists(file) else ""
    return "" if folder in sysconfig.get_paths().values() else folder


def _import(module_name: str) -> ModuleType:
    if module_name == main_name():
        return sys.modules[MAIN]  # importing it would run it again
    _importing.append(module_name)
    try:
        with _searching(top_package(module_name)):
            return importlib.import_module(module_name)
    finally:
        _importing.pop()


@contextmanager
def _searching(top: str) -> Iterator[None]:
    """Look for a module of the user's own first where it lies; afterwards that folder is the last to be searched."""
    folder = None if top in INSTALLED else _folders.get(top, "")
    if folder is None:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the module may have removed it
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)  # for what the module imports later
