"""What all tests share: no expectation of how long anything takes, Ctrl-C that works in the background, a key."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# before torch is imported: there is one test process for each core already, and threads that wait for each other spin
os.environ.setdefault("OMP_NUM_THREADS", "1")

# a busy machine is slow, not wrong
settings.register_profile("ludus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ludus")


def pytest_configure() -> None:
    """Heed SIGINT: a shell's background jobs (`make test &`) ignore it, and so would the runs in these tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sign the runs of tests with a key of their own, and leave the user's alone."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    os.environ.pop("XDG_STATE_HOME")
    if before is not None:
        os.environ["XDG_STATE_HOME"] = before
