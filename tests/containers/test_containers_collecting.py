"""How much is collected before the container gets a word in, and by whom."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from containers_setup import make_worker, train
from gymnasium.envs.classic_control import CartPoleEnv

pytestmark = pytest.mark.usefixtures("shared_fork_server")
ALTERNATE: dict[str, Any] = {"env__backend": "subproc", "env__workers": 2, "env__alternate": True}
QUICK: dict[str, Any] = {"agent__batch_size": 4, "agent__replay": 400}
LONG: dict[str, Any] = {"agent__warmup": 5000, "agent__replay": 6000, "nb_step": 6000}  # in its warm-up all the time


class Stopping(CartPoleEnv):
    """Asks this process to stop, as Ctrl-C does, at its hundredth step."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 100:
            signal.raise_signal(signal.SIGINT)
        return super().step(action)


@pytest.mark.parametrize("per_step", [0.2, 0.25, 0.3, 0.5, 1.0])
def test_groups_that_alternate_step_equally_often(per_step: float) -> None:
    """Whichever of them makes an update due, and however many steps that takes."""
    changes = QUICK | ALTERNATE | {"env__num": 2, "agent__warmup": 50, "agent__updates_per_step": per_step}
    worker = make_worker("CartPole-v1", "dqn", network__hidden=(2,), **changes)
    worker.run(1000)
    cache: Any = worker.cache
    times = [group.time for group in cache._groups.values()]
    worker.close()
    assert sum(times) >= 1000
    assert abs(times[0] - times[1]) <= 2
    assert worker.updates == pytest.approx(per_step * (worker.local_step_count - 50), abs=1)


@pytest.mark.parametrize("num", [1, 3, 64])
def test_a_run_that_ends_in_its_warm_up_ends_where_it_should(num: int) -> None:
    worker = make_worker("CartPole-v1", "dqn", env__num=num, env__backend="vector", **LONG)
    worker.run(300)
    worker.close()
    assert 300 <= worker.local_step_count < 300 + max(num, 32)
    assert not worker.updates


def test_a_signal_is_heeded_soon_in_the_warm_up(tmp_path: Path) -> None:
    result = train(tmp_path, Stopping, "dqn", env__num=1, **LONG)
    assert result.reason.startswith("SIGINT")
    assert 100 - 20 < result.steps < 100 + 32  # an ended episode's reset is no step of an agent
