"""Runs on observations of variable size: training, resuming, and acting on raw observations."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from containers_setup import make_worker, train
from list_worlds import Lists
from test_runs_resume import EVERYTHING, assert_same_run, stop_at

import ludus
from ludus.core.errors import UserError
from ludus.environments.entity_toy import MatchEnv, MotionEnv, NeighbourEnv

ENTITIES = "ludus.environments.entity_toy:"
LISTS: dict[str, Any] = {"env__max_length": 4}


@pytest.mark.parametrize(("environment", "more"), [(f"{ENTITIES}NeighbourEnv", {}), ("list_worlds:Lists", LISTS)])
def test_a_resumed_run_is_the_run_that_was_never_stopped(environment: str, more: Any, tmp_path: Path) -> None:
    settings = EVERYTHING | {"nb_step": 200} | more
    straight = train(tmp_path / "straight", environment, **settings).run
    stopped = train(tmp_path / "stopped", environment, "ppo", stop_at(3), **settings)
    assert_same_run(straight, ludus.resume(stopped.run).run)


def rollout(env: Any, steps: int = 12) -> list[Any]:
    """Return raw observations."""
    seen = [env.reset(seed=0)[0]]
    while len(seen) < steps:
        observation, _, terminated, truncated, _ = env.step(0)
        seen.append(env.reset()[0] if terminated or truncated else observation)
    return seen


def batched(space: Any, rows: list[Any]) -> Any:
    if isinstance(rows[0], dict):
        return {key: tuple(row[key] for row in rows) for key in rows[0]}
    return tuple(rows) if space.shape is None else np.stack(rows)


@pytest.mark.parametrize("kind", [MatchEnv, NeighbourEnv, MotionEnv, Lists])
def test_a_loaded_policy_takes_raw_observations(kind: Any, tmp_path: Path) -> None:
    path = f"list_worlds:{kind.__name__}" if kind is Lists else f"{ENTITIES}{kind.__name__}"
    player = ludus.load(train(tmp_path, path, **(LISTS if kind is Lists else {})).run)
    env = kind()
    rows = rollout(env)
    singles = [player.distribution(row)["probabilities"] for row in rows]
    assert len({x.tobytes() for x in singles}) > 2  # it sees them
    together = player.distribution(batched(env.observation_space, rows))["probabilities"]
    np.testing.assert_allclose(together, np.stack(singles), atol=1e-6)
    actions = player.act(batched(env.observation_space, rows))
    assert actions.tolist() == [player.act(row) for row in rows]


def test_wrong_raw_observations_are_refused(tmp_path: Path) -> None:
    player = ludus.load(train(tmp_path, f"{ENTITIES}MatchEnv", env__max_length=8).run)
    with pytest.raises(UserError, match=r"has 9 elements, but env.max_length is 8"):
        player.act(np.zeros((9, 13), np.float32))
    with pytest.raises(UserError, match=r"shape \(2, 12\), but its space says float32 of shape \(2, 13\)"):
        player.act(np.zeros((2, 12), np.float32))
    assert np.shape(player.act(np.zeros((0, 13), np.float32))) == ()  # an empty list
    assert np.shape(player.act((np.zeros((3, 13), np.float32), np.zeros((0, 13), np.float32)))) == (2,)


def test_a_replay_returns_lists_with_their_masks() -> None:
    worker = make_worker("list_worlds:Lists", "dqn", agent__warmup=40, agent__replay=200, agent__batch_size=64, **LISTS)
    worker.run(120)
    batch = worker.seat.cache.read()  # type: ignore[attr-defined]
    words, mask = batch.observation["words"], batch.observation["words/mask"]
    assert mask.dtype == torch.bool
    assert {int(n) for n in mask.sum(-1).unique()} == {0, 1, 2, 3}
    assert torch.equal(words != 0, mask & (words != 0))
    start = words[..., 0][mask.any(-1)]  # the step of the episode, of which the length is the remainder
    assert torch.equal(start % 4, mask.sum(-1)[mask.any(-1)])
    worker.close()


def test_the_example_on_the_page_about_observations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "observations.md").read_text(encoding="utf-8")
    (code,) = re.findall("```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "page_example.py").write_text(code.replace("20_000", "200"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("page_example")
    assert capsys.readouterr().out.splitlines()[-1] in ("0", "1")


class Board(gymnasium.Env[Any, Any]):
    """A board of 3 kinds of cells, counted from 1."""

    def __init__(self) -> None:
        ones = np.ones((4, 4), np.int64)
        self.observation_space = gymnasium.spaces.MultiDiscrete(3 * ones, start=ones)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.integers(1, 4, (4, 4)), {}

    def step(self, action: Any) -> Any:
        return self.np_random.integers(1, 4, (4, 4)), float(action), self.np_random.random() < 0.2, False, {}


def test_a_policy_on_a_grid_of_choices(tmp_path: Path) -> None:
    player = ludus.load(train(tmp_path, Board, env__backend="simple").run, environment=Board)
    board = np.ones((4, 4), np.int64)
    assert player.act(np.stack([board, 3 * board])).shape == (2,)
    for wrong in (0, 4, 400):
        with pytest.raises(UserError, match=rf"has the choice {wrong - 1} .*its space has 3"):
            player.act(wrong * board)
