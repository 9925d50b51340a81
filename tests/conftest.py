"""What all tests share: no expectation of how long anything takes, Ctrl-C that works in the background, a key."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# before torch is imported: there is one test process for each core already, and threads that wait for each other spin
os.environ.setdefault("OMP_NUM_THREADS", "1")

# hundreds of tests write checkpoints, and each waits for the disk; in memory, nothing waits
MEMORY, ROOM = "/dev/shm", 4 << 30  # bytes that must be free there
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

# a busy machine is slow, not wrong
settings.register_profile("ludus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ludus")


def pytest_configure() -> None:
    """Heed SIGINT: a shell's background jobs (`make test &`) ignore it, and so would the runs in these tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests, many of which compile, half an hour: a busy machine took more than five minutes for one."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1_800))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules and tests, which stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def fork_server() -> Iterator[Any]:
    """Start the server that forks environment workers, once for all tests of a module: it takes most of their time."""
    from ludus.managers import worker_pool

    launcher = worker_pool.Launcher("forkserver", worker_pool.PRELOAD)
    launcher._ensure_server()
    yield launcher
    launcher.close()


@pytest.fixture
def shared_fork_server(fork_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the managers of a test fork their workers from one server."""
    from ludus.managers import worker_pool
    from ludus.parallel.process import Launcher

    class Shared(Launcher):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._server, self._channel = fork_server._server, fork_server._channel

        def close(self) -> None:
            self._server = self._channel = None
            super().close()

    monkeypatch.setattr(worker_pool, "Launcher", Shared)


@pytest.fixture(scope="session", autouse=True)
def own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sign the runs of tests with a key of their own, and leave the user's alone."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    os.environ.pop("XDG_STATE_HOME")
    if before is not None:
        os.environ["XDG_STATE_HOME"] = before
