"""Compiles the inner loops of the replay while Ludus is installed; where no C compiler is, it comes without them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent / "ludus" / "experience" / "native.c"
BUILT = SOURCE.with_name("_native.so")
# No fused multiply-add: sums must be the same to the bit on every machine, and the same as numpy's.
OPTIONS = ("-O3", "-std=c11", "-shared", "-fPIC", "-ffp-contract=off")


def build(target: Path = BUILT) -> str | None:
    """Compile, and return why there is no library, or None; whoever has the old one loaded keeps it."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        compiler = ["cc"]
    if shutil.which(compiler[0]) is None:
        return "there is no C compiler"
    fresh = target.with_suffix(f".{os.getpid()}")
    command = [*compiler, *OPTIONS, "-o", str(fresh), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fresh.unlink(missing_ok=True)
        return f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr}"
    fresh.replace(target)
    return None


class Native(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library beside its source, and into a wheel that is then of one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        BUILT.unlink(missing_ok=True)
        if problem := build():
            print(f"Ludus' replay will run without compiled code: {problem}", file=sys.stderr)
            return
        build_data["artifacts"].append(str(BUILT.relative_to(self.root)))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
