"""Reading the settings of a run or a file without running code that they name, unless they are trusted.

Settings may name code to import: an environment, wrappers, an agent, a network, its pieces. What the user types is
trusted; what a file names is imported only if this user wrote the file on this machine
(``ludus.settings.signature``), or gives ``--trust`` or ``trust=True``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ludus.core.errors import UserError
from ludus.core.imports import has_module, is_found_without_cwd, set_search_folders, source_folder, top_package
from ludus.environments.config import parse_options
from ludus.settings.config_file import read_signed_config

LUDUS_ENVIRONMENTS = tuple(
    f"ludus.environments.{name}" for name in ("toy", "goal_toy", "image_toy")
)  # environments of Ludus
WRAPPERS = "gymnasium.wrappers"  # these need no trust either, save for those that write files
WRITES = ("RecordVideo",)
IMPORTED_FROM = "imported_from"  # in config.toml: the folders of the user's own modules at training


class TrustedSettings(NamedTuple):
    """Settings by their dotted names, whose imports may be made."""

    flat: dict[str, Any]
    signs: bool  # whether they may be written again with this user's signature
    own: bool  # whether they name code that neither Ludus nor an installed environment brings along


def read_run_settings(
    run: Path, config: Path, trust: bool = False, unused: tuple[str, ...] = (), writes: bool = False
) -> TrustedSettings:
    """The settings of a run; refuse those that would import something and are not trusted.

    ``unused``: the settings whose names start so are not used: ``env.id`` where the caller gives the environment.
    ``writes``: the run will be gone on with, so that folders that it names are written to.
    """
    return _read(config, f'The run "{run}"', trust, unused, writes)


def read_file_settings(path: Path, trust: bool = False) -> dict[str, Any]:
    """The settings of a file that the user names; the same holds for what it would import."""
    return _read(path, f'The settings file "{path}"', trust, (), True, follows=True).flat


def _read(
    path: Path, what: str, trust: bool, unused: tuple[str, ...], writes: bool, follows: bool = False
) -> TrustedSettings:
    flat, reason = read_signed_config(path, follows)
    folders = flat.pop(IMPORTED_FROM, ())
    named = dict(find_imports(flat))
    if trust or not reason:
        tops = _tops({key: names for key, names in named.items() if not key.startswith(unused)})
        set_search_folders(
            dict.fromkeys(tops, "") if trust else {top: _folder(top, folders, what) for top in sorted(tops)}
        )
        return TrustedSettings(flat, True, bool(named))
    folder = flat.get("agent.replay_folder") if writes else None
    wanted = {key: names for key, names in named.items() if not key.startswith(unused)}
    said = [f"import {', '.join(names)} ({key})" for key, names in wanted.items()]
    said += [f'write to the folder "{folder}" (agent.replay_folder)'] if folder else []
    if said:
        raise UserError(
            f"{what} is not trusted, because {reason}, and it would {' and '.join(said)}, which can do anything on "
            "this machine; if you trust its source, add --trust (in Python: trust=True)."
        )
    return TrustedSettings(flat, not named, bool(named))


def add_import_folders(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with the folders that modules of the user's own are imported from, if any are."""
    folders = sorted({source_folder(top) for top in _tops(dict(find_imports(flat)))} - {""})
    return ({IMPORTED_FROM: tuple(folders)} if folders else {}) | dict(flat)


def import_from_current_folder(typed: Mapping[str, Any]) -> None:
    """Import what the user typed from the current folder, whatever a run that was read before says."""
    set_search_folders(dict.fromkeys(_tops(dict(find_imports(typed))), ""))


def _tops(named: Mapping[str, list[str]]) -> set[str]:
    return {top_package(name) for names in named.values() for name in names}


def _folder(top: str, folders: Any, what: str) -> str | None:
    """The folder that a signed run's module was imported from: never the current one only because it is the current."""
    recorded = [folder for folder in folders if isinstance(folder, str)] if isinstance(folders, tuple) else []
    if found := next((folder for folder in recorded if has_module(folder, top)), ""):
        return found
    if is_found_without_cwd(top):
        return None
    place = f"was imported from {' or '.join(recorded)} at training" if recorded else "is not installed"
    raise UserError(
        f"{what} names the module {top}, which {place} and is not found there; bring it back, or add --trust (in "
        "Python: trust=True) to take it from the current folder."
    )


def find_imports(flat: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The import paths in settings, by their key; those of what Ludus and Gymnasium bring along are left out."""
    for key, value in flat.items():
        group = key.partition(".")[0]
        if key == "env.options":
            found = list(_option_imports(value))
        elif key in ("env.id", "env.wrappers") or (group in ("agent", "network") and key != "agent.replay_folder"):
            found = [_path(text) for text in _texts(value) if ":" in text and not _is_known(key, text)]
        else:
            found = []
        if found:
            yield key, found


def _texts(value: Any) -> Iterator[str]:
    """Every string in a value, also in lists and tables within it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in (*value.keys(), *value.values()):
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _option_imports(value: Any) -> Iterator[str]:
    for option in _texts(value):
        try:
            values = parse_options([option])
        except UserError:  # told when the settings are checked
            continue
        yield from (text for text in _texts(values) if _is_import(text))


def _is_import(text: str) -> bool:
    """Whether an option may name a module: ``gymnasium.make`` imports what stands before a colon, whatever follows."""
    module, colon, _ = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in module.strip().split("."))


def _path(text: str) -> str:
    """The path in ``path(argument=…)``."""
    return text.partition("(")[0].strip()


def _is_known(key: str, text: str) -> bool:
    """Whether a path is of an environment of Ludus's, or of a wrapper of Gymnasium's that writes nothing."""
    module, _, name = _path(text).partition(":")
    if key == "env.wrappers" and module == WRAPPERS:
        import gymnasium

        try:
            kind = getattr(importlib.import_module(module), name, None) if name not in WRITES else None
        except ImportError:  # it needs a package that is not installed
            return False
        return isinstance(kind, type) and issubclass(kind, gymnasium.Wrapper) and kind.__module__.startswith(WRAPPERS)
    if key == "env.id" and module in LUDUS_ENVIRONMENTS and text == _path(text):
        import gymnasium

        kind = getattr(importlib.import_module(module), name, None)
        return isinstance(kind, type) and issubclass(kind, gymnasium.Env)
    return False
