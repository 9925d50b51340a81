"""What all tests share: no expectation of how long anything takes, and Ctrl-C that works however they were started."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# a busy machine is slow, not wrong
settings.register_profile("ludus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ludus")


def pytest_configure() -> None:
    """Heed SIGINT: a shell's background jobs (`make test &`) ignore it, and so would the runs in these tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
