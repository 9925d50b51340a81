"""Two ranks learn what one process learns (``make test-slow``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_tasks import Task, run

RANKS = {"container": "distrib", "distrib.ranks": 2}
TASKS = {
    task.name: task
    for task in (
        Task("cartpole/ppo", "CartPole-v1", "ppo", 475, 100_000, 3, RANKS),
        Task("pendulum/sac", "Pendulum-v1", "sac", -200, 20_000, 3, RANKS | {"env.num": 2}, every=2_000),
    )
}


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TASKS)
def test_two_ranks_learn_the_task(name: str, seed: int, tmp_path: Path) -> None:
    outcome = run(TASKS[name], seed, tmp_path)
    print(outcome)
    assert outcome.passes(TASKS[name]), f"{outcome}, target {TASKS[name].target:g}"
