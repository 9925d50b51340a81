"""Read the settings of a run or a file, and refuse to import code that an untrusted file names.

Settings may name code to import: an environment, wrappers, an agent, a network and its pieces, checks of networks. Code
that the user types is trusted. Code that a file names is imported only if this user wrote the file on this machine
(``ludus.settings.signature``), or with ``--trust`` or ``trust=True``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ludus.core.errors import UserError
from ludus.core.imports import has_module, is_found_without_cwd, set_search_folders, source_folder, top_package
from ludus.core.schedule import KINDS, RETURN_KINDS
from ludus.environments.config import parse_options
from ludus.settings.config_file import read_signed_config

LUDUS_ENVIRONMENTS = tuple(
    f"ludus.environments.{name}" for name in ("toy", "goal_toy", "image_toy", "entity_toy", "command_toy", "agents_toy")
)
# trusted too, except for those that write files
WRAPPERS = ("gymnasium.wrappers", "ludus.environments.openings", "ludus.environments.trajectory")
WRITING_WRAPPERS = ("RecordVideo",)
# settings of agents that may have a colon; names of actions and observations, folders
NAMES_NO_CODE = ("agent.replay_folder", "agent.teacher", "agent.heads", "agent.autoregressive", "agent.arguments")
IMPORTED_FROM = "imported_from"  # key in config.toml: the folders that the user's modules were imported from
ROLE_PREFIX = re.compile(r"^roles\.[^.]+\.(?=(agent|network)\.)")
LOCAL_CLUSTER = "auto"  # impala.cluster: Ray on this machine, started for the run


class TrustedSettings(NamedTuple):
    """Settings by their dotted names; the code that they name may be imported."""

    flat: dict[str, Any]
    may_sign: bool  # whether a changed file may get this user's signature


def read_run_settings(
    run: Path, config: Path, trust: bool = False, unused: tuple[str, ...] = (), writes: bool = False
) -> TrustedSettings:
    """Read the settings of a run; refuse those of an untrusted file that name code to import.

    Settings with the prefixes ``unused`` are ignored, such as ``env.id`` if the caller gives the environment. If the
    run ``writes``, a replay folder and a Ray cluster that it names must be trusted too.
    """
    return _read(config, f'The run "{run}"', trust, unused, writes)


def read_file_settings(path: Path, trust: bool = False) -> dict[str, Any]:
    """Read the settings of a file; refuse those of an untrusted file that name code to import."""
    return _read(path, f'The settings file "{path}"', trust, (), True, follow_links=True).flat


def _read(
    path: Path, what: str, trust: bool, unused: tuple[str, ...], writes: bool, follow_links: bool = False
) -> TrustedSettings:
    flat, reason = read_signed_config(path, follow_links)
    folders = flat.pop(IMPORTED_FROM, ())
    named = dict(find_imports(flat))
    wanted = {key: names for key, names in named.items() if not key.startswith(unused)}
    if trust or not reason:
        tops = _top_packages(wanted)
        set_search_folders(
            dict.fromkeys(tops, "") if trust else {top: _folder(top, folders, what) for top in sorted(tops)}
        )
        return TrustedSettings(flat, True)
    folder = flat.get("agent.replay_folder") if writes else None
    cluster = flat.get("impala.cluster") if writes and "impala.cluster" not in unused else None
    actions = [f"import {', '.join(names)} ({key})" for key, names in wanted.items()]
    actions += [f'write to the folder "{folder}" (agent.replay_folder)'] if folder else []
    if cluster not in (None, "", LOCAL_CLUSTER):
        actions.append(f"exchange data with the Ray cluster {cluster} (impala.cluster)")
    if actions:
        raise UserError(
            f"{what} is not trusted, because {reason}, and it would {' and '.join(actions)}, which can do anything on "
            "this machine; if you trust its source, add --trust (in Python: trust=True)."
        )
    return TrustedSettings(flat, not named)


def add_import_folders(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Add the folders that the user's modules were imported from, for ``config.toml``."""
    folders = sorted({source_folder(top) for top in _top_packages(dict(find_imports(flat)))} - {""})
    return ({IMPORTED_FROM: tuple(folders)} if folders else {}) | dict(flat)


def import_from_current_folder(typed: Mapping[str, Any]) -> None:
    """Import the modules that the user typed from the current folder."""
    set_search_folders(dict.fromkeys(_top_packages(dict(find_imports(typed))), ""))


def _top_packages(named: Mapping[str, list[str]]) -> set[str]:
    return {top_package(name) for names in named.values() for name in names}


def _folder(top: str, folders: Any, what: str) -> str | None:
    """Return the folder that a signed run's module was imported from; None if it is installed."""
    recorded = [folder for folder in folders if isinstance(folder, str)] if isinstance(folders, tuple) else []
    if found := next((folder for folder in recorded if has_module(folder, top)), ""):
        return found
    if is_found_without_cwd(top):
        return None
    place = f"was imported from {' or '.join(recorded)} at training" if recorded else "is not installed"
    raise UserError(
        f"{what} names the module {top}, which {place} and is not found there; restore it, or add --trust (in "
        "Python: trust=True) to import it from the current folder."
    )


def find_imports(flat: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Return the import paths in settings by key, except for those of Ludus and Gymnasium."""
    for full, value in flat.items():
        key = ROLE_PREFIX.sub("", full)  # roles.prey.agent.… is like agent.…
        group = key.partition(".")[0]
        if key == "env.options":
            found = list(_option_imports(value))
        elif key in ("env.id", "env.wrappers", "network_check.functions", "roles.agents") or (
            group in ("agent", "network") and key not in NAMES_NO_CODE
        ):
            texts = [_after_pattern(key, item) for text in _texts(value) for item in _items(key, text)]
            found = [_path(text) for text in texts if ":" in text and not _names_no_code(key, text)]
        else:
            found = []
        if found:
            yield full, found


def _texts(value: Any) -> Iterator[str]:
    """Return all strings in a value, including nested lists and tables."""
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
        except UserError:  # reported when the settings are validated
            continue
        for text in _texts(values):
            module, colon, _ = text.partition(":")  # gymnasium.make imports what precedes a colon
            if colon and all(part.isidentifier() for part in module.strip().split(".")):
                yield text


def _after_pattern(key: str, text: str) -> str:
    """Return the piece of ``pattern=piece`` in ``network.sources``, else the text."""
    return text.partition("=")[2] if key.startswith("network.") and key.endswith(".sources") else text


def _items(key: str, text: str) -> list[str]:
    """Return the agents in ``roles.agents``, else the text."""
    return [item.partition("=")[2] for item in text.split(",")] if key == "roles.agents" else [text]


def _path(text: str) -> str:
    """Return the path of ``path(argument=…)``."""
    return text.partition("(")[0].strip()


def _names_no_code(key: str, text: str) -> bool:
    """Return whether a text with a colon is a schedule with points, as in ``piecewise(0: 1, 0.5: 0)``, or trusted."""
    is_schedule = key.startswith("agent.") and _path(text) in (*KINDS, *RETURN_KINDS)
    return is_schedule or _is_trusted_class(key, text)


def _is_trusted_class(key: str, text: str) -> bool:
    """Return whether a path is an environment of Ludus, or a wrapper of Gymnasium or Ludus that writes no files."""
    module, _, name = _path(text).partition(":")
    is_wrapper = key == "env.wrappers" and module in WRAPPERS and name not in WRITING_WRAPPERS
    is_environment = key == "env.id" and module in LUDUS_ENVIRONMENTS and text == _path(text)
    if not is_wrapper and not is_environment:
        return False
    import gymnasium

    try:
        kind = getattr(importlib.import_module(module), name, None)
    except ImportError:  # it needs a package that is not installed
        return False
    if not (isinstance(kind, type) and kind.__module__.startswith(module)):
        return False
    if is_wrapper:
        return issubclass(kind, gymnasium.Wrapper)
    return issubclass(kind, gymnasium.Env) or hasattr(kind, "step")  # several agents: derives from nothing
