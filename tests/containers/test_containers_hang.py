"""An environment in this process that does not answer is told of."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from containers_setup import train

from ludus.containers import hang
from ludus.environments.toy import CountingEnv
from ludus.logging.console import Console

heard = threading.Event()


class Waits(CountingEnv):
    """Waits at its 40th step until somebody has said so."""

    steps = 0

    def step(self, action: Any) -> Any:
        Waits.steps += 1
        if Waits.steps == 40:
            assert heard.wait(60)
        return super().step(action)


def test_a_call_that_does_not_return_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def urgent(console: Console, text: str) -> None:
        told.append(text)
        heard.set()

    monkeypatch.setattr(Console, "urgent", urgent)
    train(tmp_path, CountingEnv, env__backend="simple", quiet=False)
    assert told == []
    monkeypatch.setattr(hang, "SECONDS", 0.5)
    result = train(tmp_path, Waits, env__backend="simple", quiet=False)
    assert result.steps >= 100
    assert len(told) == 1
    assert told[0].startswith("The environment has not answered for 0.5 s; Ctrl-C stops, and --env.backend subproc ")
