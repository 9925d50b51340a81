"""Warn once when an environment in this process does not return."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ludus.containers.local import LocalWorker

SECONDS = 30.0  # of one call of an environment before the warning


@contextmanager
def warn_of_hangs(worker: LocalWorker) -> Iterator[None]:
    """Watch the worker's environments from another thread within this block; not in a quiet run."""
    console = None if worker.reporter is None else worker.reporter.console
    if console is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        seen, since = worker.current_call(), time.monotonic()
        while not over.wait(SECONDS / 6):
            now = worker.current_call()
            if now is None or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since >= SECONDS:
                console.urgent(
                    f"The environment has not answered for {SECONDS:g} s; Ctrl-C stops, and --env.backend subproc "
                    "replaces environments that hang."
                )
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
