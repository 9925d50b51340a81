"""Compiles the inner loops of the replay while Ludus is installed; where no C compiler is, it comes without them."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent / "ludus" / "experience" / "native.c"
BUILT = SOURCE.with_name("_native.so")
# No fused multiply-add: sums must be the same to the bit on every machine, and the same as numpy's.
OPTIONS = ("-O3", "-std=c11", "-shared", "-fPIC", "-ffp-contract=off")


def build() -> str | None:
    """Compile, and return why there is no library, or None; whoever has the old one loaded keeps it."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "") or ["cc"]
    if shutil.which(compiler[0]) is None:
        compiler = ["cc"]
    fresh = BUILT.with_suffix(f".{os.getpid()}")
    version = f"-DVERSION={zlib.crc32(SOURCE.read_bytes())}u"  # native.py wants that of the source beside it
    command = [*compiler, *OPTIONS, version, "-o", str(fresh), str(SOURCE)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
        fresh.replace(BUILT)
    except FileNotFoundError:
        return "there is no C compiler"
    except subprocess.CalledProcessError as error:
        return f"{error}\n{error.stderr}"
    except OSError as error:  # such as a source tree that cannot be written to
        return str(error)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
    return None


class Native(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library beside its source, and into a wheel that is then of one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if problem := build():
            print(f"Ludus' replay will run without compiled code: {problem}", file=sys.stderr)
            with contextlib.suppress(OSError):
                BUILT.unlink(missing_ok=True)  # it would be of another source
            return
        build_data["artifacts"].append(str(BUILT.relative_to(self.root)))
        build_data["pure_python"] = False
        platform = self.build_config.builder.get_best_matching_tag().rpartition("-")[2]
        build_data["tag"] = f"py3-none-{platform}"  # a library that knows nothing of Python
