"""Start the other ranks of a run on this machine, and end the run when one of them ends."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import FileStore, Store

from ludus.containers.ranks import GRACE, make_shared_sum
from ludus.core.errors import UserError
from ludus.core.imports import import_path, is_importable, is_importable_elsewhere
from ludus.parallel.process import Launcher, Process, end_all
from ludus.settings.settings import Settings, to_flat
from ludus.settings.trust import find_imports

TARGET = "ludus.containers.distrib"  # imported once, by the process that forks the ranks
SUM = "sum"  # name of the file descriptor of the memory in which ranks sum
RANK_LOST = 75  # exit code of a rank that ended because another one did
START = 300.0  # seconds to import torch
CLOSE = 30.0  # seconds to close the environments after the last checkpoint


class RankProcesses:
    """The ranks from 1 on, as processes of this machine that end with this one."""

    def __init__(self, settings: Settings[Any]) -> None:
        self._folder = tempfile.mkdtemp(prefix="ludus-ranks-")
        self.store = open_store(self._folder, settings.ranks)
        self.shared = make_shared_sum(0, settings.ranks)
        fds = {} if self.shared is None else {SUM: self.shared.fd}
        self._launcher, self._processes = Launcher(preload=(TARGET,), deadline=START), list[Process]()
        try:
            for rank in range(1, settings.ranks):
                given = {"rank": rank, "settings": to_flat(settings), "folder": self._folder}
                self._processes.append(self._launcher.start(f"{TARGET}:run_rank", given, fds, f"Rank {rank}"))
        except BaseException:
            self.end()
            raise

    def check(self) -> None:
        """Raise the error of a rank that has ended; of several, that of the first cause."""
        ended = [process for process in self._processes if process.wait(0)]
        if not ended:
            return
        until = time.monotonic() + GRACE
        while all(process.code == RANK_LOST for process in ended) and time.monotonic() < until:
            time.sleep(0.01)  # another rank ended first, and its exit code is not known yet
            ended = [process for process in self._processes if process.wait(0)]
        cause = next((process for process in ended if process.code != RANK_LOST), ended[0])
        failure = cause.failure()
        if failure.user:
            error = UserError(f"{cause.name}: {failure.user}")
            error.details = failure.user_stack
        else:
            error = UserError(f"{failure.name} {failure.what}; `ludus resume` continues from the last checkpoint.")
            error.details = f"{failure.details.lstrip()}\n" if failure.details else ""
        raise error from failure

    def join(self) -> None:
        """Wait until the processes have ended by themselves, after a complete run."""
        end_all(self._processes, patience=CLOSE)

    def end(self) -> None:
        """End the processes; may be called twice."""
        self._launcher.close()
        if self.shared is not None:
            self.shared.close()
        self.delete_store()

    def delete_store(self) -> None:
        """Delete the file in which the ranks met; gloo needs it no longer once all are connected."""
        shutil.rmtree(self._folder, ignore_errors=True)


def open_store(folder: str, ranks: int) -> Store:
    """Open the file in which the ranks of one machine meet."""
    return FileStore(f"{folder}/store", ranks)


def refuse_local_code(settings: Settings[Any], environment: Callable[..., Any] | None, instead: str) -> None:
    """Refuse classes and functions that other processes cannot import, and other systems than Linux.

    The error says what to do ``instead``.
    """
    container = settings.container
    if sys.platform != "linux":
        raise UserError(f"container is {container}, whose processes need Linux here; {instead}.")
    local = [
        name
        for names in dict(find_imports(to_flat(settings))).values()
        for name in names
        if not is_importable_elsewhere(name)
    ]
    if environment is not None and not is_importable(import_path(environment), environment):
        local.append(getattr(environment, "__qualname__", repr(environment)))
    if local:
        raise UserError(
            f"container is {container}, but {local[0]} cannot be imported by another process; define it at the top of "
            f"a module, or {instead}."
        )
