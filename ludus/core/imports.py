"""Convert names in settings to classes and back.

``ppo`` is looked up in a table; ``my_pkg.mod:MyAgent`` is imported. Every process resolves the same name to the same
class, so classes are never pickled.
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
INSTALLED = ("ludus", "gymnasium")  # packages that are not searched for in the current folder
_local: dict[str, Any] = {}  # classes and functions that cannot be imported, by their name in settings
_folders: dict[str, str | None] = {}  # search folder by top-level package; "" or missing: the current folder
_importing: list[str] = []  # modules whose import is in progress


def resolve(name: str, known: Mapping[str, str], kind: str) -> Any:
    """Return the object for ``name``: a key of ``known``, whose values are ``module:attribute``, or such a path."""
    if name in _local:
        return _local[name]
    path = known.get(name, name)
    if ":" not in path:
        listed = ", ".join(sorted(known))
        raise UserError(
            f'Unknown {kind} "{name}".{did_you_mean(name, known)} Choose one of {listed}, or give your own as '
            "package.module:Class."
        )
    module_name, _, attribute = path.partition(":")
    if "<" in attribute:
        raise _not_importable(name, kind)
    try:
        module = _import(module_name)
    except ImportError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise UserError(
                f'{kind} "{name}": module {module_name} needs {error.name}, which is not installed; install '
                "it with pip."
            ) from error
        raise UserError(
            f'{kind} "{name}": there is no module {module_name} to import; run the command in the folder that has it, '
            "or install it."
        ) from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except ImportError as error:  # gymnasium.wrappers imports a wrapper when it is first used
        raise UserError(f'{kind} "{name}" needs {error.name}, which is not installed; install it with pip.') from error
    except AttributeError as error:
        if module_name == MAIN:
            raise _not_importable(name, kind) from error
        defined = [key for key, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__]
        hint = did_you_mean(attribute, vars(module)) or f" Choose one of {', '.join(defined) or 'none'}."
        raise UserError(f'{kind} "{name}": module {module_name} has no {attribute}.{hint}') from error


def name_for(thing: Callable[..., Any], known: Mapping[str, str]) -> str:
    """Return the name of a class or function for settings: its key in ``known``, else ``module:QualName``.

    What cannot be imported (a lambda, a partial, a class defined in a function) gets a name with ``<`` in it, which
    ``resolve`` understands only in this process.
    """
    path = import_path(thing)
    if short := next((name for name, place in known.items() if place == path), ""):
        return short
    if is_importable(path, thing):
        return path
    path = path if "<" in path else f"{path}.<local>"
    name, count = path, 1
    while _local.get(name, thing) is not thing:  # the name is in use
        count += 1
        name = f"{path}.<{count}>"
    _local[name] = thing
    return name


def is_importable(path: str, thing: Any) -> bool:
    """Return whether importing ``path`` yields ``thing``."""
    if "<" in path:
        return False
    try:
        return resolve(path, {}, "class") is thing
    except UserError:
        return False


def import_path(thing: Callable[..., Any]) -> str:
    """Return ``module:name`` of a class or function; a partial gets the name of its function and ``.<partial>``."""
    if isinstance(thing, partial):
        return f"{import_path(thing.func)}.<partial>"
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    module = main_name() if kind.__module__ == MAIN else kind.__module__
    return f"{module}:{kind.__qualname__}"


def is_importable_elsewhere(path: str) -> bool:
    """Return whether another process could import ``path``, judging by the name."""
    return "<" not in path and not path.startswith(f"{MAIN}:")


def _not_importable(name: str, kind: str) -> UserError:
    arguments = {"agent": "agent=", "network": "network=", "wrapper": "wrappers=", "environment": "environment="}
    alternative = f", or pass it from Python, as in ludus.load(run, {arguments[kind]}…)" if kind in arguments else ""
    return UserError(
        f'{kind} "{name}" was defined in a function, a notebook or at a prompt, so it cannot be imported by that name; '
        f"define it at the top level of a module{alternative}."
    )


def main_name() -> str:
    """Return the name under which the running script or module can be imported."""
    main = sys.modules[MAIN]
    spec = getattr(main, "__spec__", None)  # set by python -m
    return spec.name if spec is not None else Path(getattr(main, "__file__", None) or MAIN).stem


def check_not_importing(call: str) -> None:
    """Raise a UserError if ``call`` is made at the top level of a module that is being imported."""
    if _importing:
        raise UserError(
            f"The module {_importing[-1]} calls {call} when it is imported; put that call under "
            '`if __name__ == "__main__":`.'
        )


def set_search_folders(folders: Mapping[str, str | None]) -> None:
    """Set the folder to search first for each top-level package.

    An empty string is the current folder, the default; None searches only ``sys.path``.
    """
    _folders.update(folders)


def search_folders() -> dict[str, str | None]:
    """Return the search folders, to pass to another process."""
    return dict(_folders)


def top_package(path: str) -> str:
    """Return ``package`` of ``package.module:Class``."""
    return path.partition(":")[0].partition(".")[0].strip()


def has_module(folder: str, top: str) -> bool:
    """Return whether ``folder`` contains the module, without importing it."""
    return os.path.isabs(folder) and PathFinder.find_spec(top, [folder]) is not None


def is_found_without_cwd(top: str) -> bool:
    """Return whether a module is imported already or found without searching the current folder."""
    if top in sys.modules or top == main_name() or PathFinder.find_spec(top, [path for path in sys.path if path]):
        return True
    others = (finder for finder in sys.meta_path if finder is not PathFinder)  # for pip install -e
    return any(finder.find_spec(top, None) is not None for finder in others)


def source_folder(top: str) -> str:
    """Return the folder of a module, or an empty string if it is installed."""
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
        with _search_path(top_package(module_name)):
            return importlib.import_module(module_name)
    finally:
        _importing.pop()


@contextmanager
def _search_path(top: str) -> Iterator[None]:
    """Search the module's folder first; afterwards move it to the end of ``sys.path`` for later imports."""
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
            sys.path.append(folder)
