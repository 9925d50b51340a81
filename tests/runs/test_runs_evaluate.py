"""Evaluations that are divided among processes equal those in one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from containers_setup import train

import ludus
from ludus.containers.evaluate import summarize
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.parallel.orphans import running_processes, with_descendants
from ludus.runs.evaluate import Task, evaluate_in_processes
from ludus.runs.policy import Player


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divided")
    limit = {"env__max_episode_steps": 30, "env__num": 5}
    return train(folder, "Pendulum-v1", "ppo", network__body="lstm", **limit).run


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_rows_played_apart_are_the_whole(run: Path, greedy: bool, parts: int) -> None:
    """Bit for bit: the seeds, the noise and the size of the batch are those of the whole."""
    player = ludus.load(run)
    rows = player.divide_rows(8, parts)
    assert len(rows) == parts
    assert [x for part in rows for x in range(part.start, part.stop)] == list(range(5))
    whole = player.evaluate(8, seed=3, greedy=greedy)
    apart = [episode for part in reversed(rows) for episode in player.play_rows(part, 8, 3, greedy)]
    assert summarize(apart) == whole
    assert len(set(whole.returns)) == 8
    player.close()


def test_environments_that_step_as_a_batch_are_not_divided(tmp_path: Path) -> None:
    player = ludus.load(train(tmp_path, "CartPole-v1", env__num=8).run)
    assert player.divide_rows(100, 4) == [Rows.all(8)]
    assert player.divide_rows(4, 4) == [Rows(i, i + 1, 4) for i in range(4)]  # too few for a vector environment
    player.close()


def task(run: Path, player: Player) -> Task:
    return Task(run, "best", "runs", False, player)


def test_processes_play_what_one_does(run: Path) -> None:
    player, seen, warned = ludus.load(run), list[tuple[int, int]](), list[str]()
    expected = player.evaluate(8, seed=1)
    tasks = [task(run, player)] * 2
    found = evaluate_in_processes(tasks, 8, 1, True, 3, lambda *numbers: seen.append(numbers), warned.append)
    assert found == [expected, expected]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert warned == []
    assert with_descendants([os.getpid()], running_processes()) == [os.getpid()]
    player.meta = {"step": -1}  # as if another policy had been saved before the workers loaded it
    with pytest.raises(UserError, match="saved a new best policy while it was loaded"):
        evaluate_in_processes([task(run, player)], 1, 1, True, 2, on_warning=warned.append)
    assert warned[0].startswith("1 of 2 workers are used")
    player.close()
