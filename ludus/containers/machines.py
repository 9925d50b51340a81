"""What the machines of a cluster must have in common: versions, folders with code, and a token of Ray."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import ludus
from ludus.core import imports
from ludus.core.errors import UserError

AUTH_MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # environment variables of Ray
GPUS = "CUDA_VISIBLE_DEVICES"
TOKEN_FILE = Path(".ray", "auth_token")  # in the home folder


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines."""
    return {"ludus": ludus.__version__, "torch": torch.__version__, "Python": platform.python_version()}


def refuse_other_versions(expected: Mapping[str, str], address: str, other: str) -> None:
    """Raise a UserError if this machine, ``address``, has other versions than the ``other`` process."""
    for name, version in versions().items():
        if version != expected[name]:
            raise UserError(
                f"{address} has {name} {version}, and {other} has {expected[name]}; install the same version on all "
                "machines."
            )


def code_folders() -> dict[str, Any]:
    """Return the folders from which this process imports modules, to pass to other machines."""
    here = os.getcwd()
    folders = {top: here if folder == "" else folder for top, folder in imports.search_folders().items()}
    return {"path": [folder or here for folder in sys.path], "folders": folders}


def use_code_folders(given: Mapping[str, Any]) -> None:
    """Import modules from the folders of the host too; those that this machine does not have are ignored."""
    sys.path += [folder for folder in given["path"] if folder not in sys.path]
    imports.set_search_folders(given["folders"])


def use_environment(given: Mapping[str, str], keeps_gpus: bool) -> None:
    """Use the environment variables of another process of this machine, except for Ray's and those of reserved GPUs."""

    def kept(name: str) -> bool:
        return name.startswith("RAY_") or (keeps_gpus and name == GPUS)

    for name in [name for name in os.environ if name not in given and not kept(name)]:
        del os.environ[name]
    for name, value in given.items():
        if os.environ.get(name) != value and not kept(name):
            os.environ[name] = value


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from its own machine alone."""
    return host.startswith("127.") or host in ("localhost", "::1")


def has_token() -> bool:
    """Return whether Ray finds a token here."""
    return any(os.environ.get(name) for name in (TOKEN, TOKEN_PATH)) or (Path.home() / TOKEN_FILE).exists()


def uses_token() -> bool:
    """Return whether Ray authenticates by its token in this process."""
    return os.environ.get(AUTH_MODE, "disabled") != "disabled"


def refuse_without_token(address: str, host: str) -> None:
    """Refuse a cluster if others in the network reach its ``host``, and this process has or uses no token for it."""
    if is_loopback(host) or (has_token() and uses_token()):
        return
    missing = f"{AUTH_MODE} is not token" if has_token() else "there is no token"
    raise UserError(
        f"The cluster {address} can be reached by other machines, and {missing}, so anyone there could run code in it; "
        f"run `ray get-auth-token --generate`, copy ~/{TOKEN_FILE} to all machines, and set {AUTH_MODE}=token "
        "before `ray start` and here."
    )
