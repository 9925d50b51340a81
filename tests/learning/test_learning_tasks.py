"""Every task of ``learning_tasks.py``, seed by seed (``make test-slow``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_tasks import TASKS, run

SEEDS = [(name, seed) for name, task in TASKS.items() for seed in range(task.seeds)]


@pytest.mark.slow
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_the_task_is_learned(name: str, seed: int, tmp_path: Path) -> None:
    if TASKS[name].needs:
        pytest.importorskip(TASKS[name].needs)
    outcome = run(TASKS[name], seed, tmp_path)
    assert outcome.passes(TASKS[name]), f"{outcome}, target {TASKS[name].target:g}"
