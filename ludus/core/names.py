"""From a name on the command line to a class: the one place where that happens.

``ppo`` is looked up in the table of the package that asks; ``my_pkg.mod:MyAgent`` is imported as it
stands. Every process, local or remote, resolves the same string to the same class, so nothing is ever pickled.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ludus.core.errors import UserError, nearest

INSTALLED = ("ludus", "gymnasium")  # packages that are never looked for in the current folder


def resolve(name: str, known: Mapping[str, str], kind: str) -> Any:
    """Return the object behind ``name``: a key of ``known`` (whose value is ``module:name``) or such a path itself."""
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
        raise UserError(
            f'{kind} "{name}" is a local class or function, which no other process can find; move it to a module.'
        )
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
        return getattr(module, attribute)
    except AttributeError as error:
        raise UserError(
            f'{kind} "{name}": module {module_name} has no {attribute}.{nearest(attribute, vars(module))}'
        ) from error


def main_name() -> str:
    """The name under which the script or module that runs can be imported."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)  # there is one with python -m
    return spec.name if spec is not None else Path(getattr(main, "__file__", None) or "__main__").stem


def _import(module_name: str) -> ModuleType:
    if module_name == main_name():
        return sys.modules["__main__"]  # importing it would run it again
    return importlib.import_module(module_name)
