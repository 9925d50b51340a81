"""Runs with pieces whose state is easily forgotten are resumed to the bit: dropout, batch norm, stacked memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from containers_setup import train
from test_runs_resume import EVERYTHING, assert_same_run, stop_at

import ludus

PIECES = {
    "mlp(dropout=0.2)": "net1d",
    "mlp(norm='batch')": "net1d",
    "lstm(layers=2)": "body",
    "gtrxl(width=8, heads=2, layers=1, memory=4)": "body",
}


@pytest.mark.parametrize("piece", [p if "mlp" in p else pytest.param(p, marks=pytest.mark.slow) for p in PIECES])
def test_resumed_run_equals_the_run_that_was_never_stopped(piece: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = EVERYTHING | {"nb_step": 200, f"network__{PIECES[piece]}": piece}
    straight = train(tmp_path / "straight", "CartPole-v1", "ppo", **settings)
    stopped = train(tmp_path / "stopped", "CartPole-v1", "ppo", stop_at(3), **settings)
    assert stopped.steps < straight.steps
    assert_same_run(straight.run, ludus.resume(stopped.run).run)
