"""Hindsight from the settings to the replay: where rewards and endings come from, what is refused, and exact resume."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_runs_resume import assert_same_run, stop_at

import ludus
from ludus.agents.dqn import DQN
from ludus.containers.build import build_agent, build_evaluator, build_manager
from ludus.containers.local import LocalWorker
from ludus.containers.updater import LocalUpdater
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.environments.goal_toy import BitFlipEnv
from ludus.settings.settings import resolve_settings

pytestmark = pytest.mark.usefixtures("shared_fork_server")
BITS = "ludus.environments.goal_toy:BitFlipEnv"
SMALL: dict[str, Any] = {
    "network.hidden": (8,),
    "env.num": 4,
    "env.options": ("bits=4",),
    "threads": 1,
    "compile": "off",
    "agent.batch_size": 32,
    "agent.warmup": 40,
    "agent.replay": 400,
    "agent.hindsight": 0.8,
    "evaluation.every": 0,
    "evaluation.episodes": 4,
}


class Grudging(BitFlipEnv):
    """Cannot tell the rewards of many goals, nor of any that it did not set."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        if desired_goal is not self._goal:
            raise ValueError("not my goal")
        return super().compute_reward(achieved_goal, desired_goal, info)


class Untold(BitFlipEnv):
    """Ends episodes, but does not say where others would end."""

    compute_terminated = None  # type: ignore[assignment]

    def step(self, action: Any) -> Any:
        self._step += 1
        self._current[action] ^= 1
        reward = float(self.compute_reward(self._current, self._goal, {}))
        return self._observe(), reward, reward == 0, self._step >= self.bits, {}


class Mine(DQN):
    """A user's agent with a cache of its own making."""

    def make_cache(self, batch: int) -> Any:
        assert self.goal_reward is not None
        return super().make_cache(batch)


def make_worker(environment: str = BITS, agent: str = "dqn", **changes: Any) -> LocalWorker:
    settings = resolve_settings(environment, agent, "none", None, SMALL | changes).settings
    manager = build_manager(settings)
    made = build_agent(settings, manager.observation, manager.action, torch.device("cpu"))
    manager.set_action_transform(made.action_transform)
    updater, evaluator = LocalUpdater(made), build_evaluator(settings, made)
    return LocalWorker(settings, made, manager, updater, evaluator)


def train(runs: Path, environment: Any = BITS, agent: str = "dqn", hook: Any = None, **changes: Any) -> Any:
    settings = SMALL | {"runs": str(runs), "quiet": True, "nb_step": 400} | changes
    return ludus.train(environment, agent, preset="none", settings=settings, on_update=hook)


@pytest.mark.parametrize("backend", [{}, {"env.backend": "subproc", "env.workers": 1}], ids=["simple", "subproc"])
@pytest.mark.parametrize("share", [0.8, 0.0])
def test_what_is_drawn_has_the_rewards_and_endings_of_its_goals(backend: dict[str, Any], share: float) -> None:
    worker = make_worker(**backend | {"agent.hindsight": share})
    try:
        worker.run(300)
        reached = 0
        for _ in range(20):
            batch = worker.cache.read()
            got, wanted = batch.observation["achieved_goal"][1], batch.observation["desired_goal"]
            assert torch.equal(wanted[0], wanted[1])
            there = (got == wanted[1]).all(-1)
            assert torch.equal(batch.reward[0], there.float() - 1)
            assert torch.equal(batch.terminated[0], there)
            assert torch.equal(batch.discount[0] == 0, there)
            reached += int(there.sum())
        # in hindsight, of goals 1 to 4 steps ahead, the next state is every second or third
        assert (reached > 20 * 32 * 0.8 * 0.3) == (share > 0)
    finally:
        worker.close()


def test_the_flip_that_ends_an_episode_is_worth_nothing_more() -> None:
    """Were a goal met in hindsight bootstrapped from, it would be −0.9 / (1 − 0.81) in the end."""
    quick = {"agent.learning_rate": 3e-3, "agent.gamma": 0.9, "agent.target_every": 20, "agent.replay": 2500}
    worker = make_worker(**quick | {"network.hidden": (64,), "network.activation": "relu"})
    worker.run(2500)
    agent: Any = worker.agent
    bits = torch.tensor(list(product((0, 1), repeat=4)), dtype=torch.int8)
    now, flip = bits.repeat_interleave(4, 0), torch.arange(4).repeat(16)
    wanted = now.clone()
    wanted[torch.arange(64), flip] ^= 1
    seen = agent.preprocess({"observation": now[None], "achieved_goal": now[None], "desired_goal": wanted[None]})
    with torch.no_grad():
        outputs, _ = agent.run("q", seen, agent.initial_state(64), torch.ones(1, 64, dtype=torch.bool))
        last = agent.head.q(outputs)[0].gather(-1, flip[:, None])[:, 0]
    assert last.abs().mean() < 0.1


def test_a_run_says_that_endings_are_kept() -> None:
    worker = make_worker(f"{__name__}:Untold")
    with pytest.warns(RuntimeWarning, match="the environment has no compute_terminated"):
        worker.run(300)


def test_the_rewards_of_goals_are_in_no_checkpoint() -> None:
    worker = make_worker()
    assert worker.agent.goal_reward is not None
    assert not [name for name in worker.agent.state_dict() if "goal_reward" in name]
    assert make_worker(**{"agent.hindsight": 0.0}).agent.goal_reward is None


def test_an_agent_of_the_user_finds_them(tmp_path: Path) -> None:
    assert train(tmp_path, agent=f"{__name__}:Mine", nb_step=100).steps >= 100


@pytest.mark.parametrize(
    ("environment", "changes", "said"),
    [
        ("CartPole-v1", {"env.options": ()}, 'no observation "achieved_goal"'),
        (
            f"{__name__}:Grudging",
            {},
            "Grudging: compute_reward.* raised ValueError: not my goal; .*agent.hindsight to 0",
        ),
        (
            BITS,
            {"env.wrappers": ("gymnasium.wrappers:NormalizeReward",)},
            "wrapper NormalizeReward changes rewards",
        ),
    ],
)
def test_what_cannot_tell_them_is_refused_before_the_first_step(
    environment: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        train(tmp_path, environment, **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["simple", "subproc"])
def test_a_wrapper_that_sums_rewards_is_refused_before_the_first_update(backend: str, tmp_path: Path) -> None:
    changes = {"env.wrappers": ("gymnasium.wrappers:RepeatAction(num_repeats=2)",), "env.backend": backend}
    with pytest.raises(UserError, match="a reward of -2 where compute_reward gives -1 for the same goals"):
        train(tmp_path, **changes)
    assert not list(tmp_path.glob("*/*"))
    assert train(tmp_path, nb_step=100, **changes | {"agent.hindsight": 0.0}).steps >= 100


def test_nobody_else_needs_them(tmp_path: Path) -> None:
    assert train(tmp_path, f"{__name__}:Grudging", nb_step=100, **{"agent.hindsight": 0.0}).steps >= 100


@pytest.mark.parametrize("more", [{}, {"agent.n_step": 2, "agent.prioritized": True}], ids=["plain", "n-step"])
def test_a_stopped_and_resumed_run_is_the_run_that_was_never_stopped(more: dict[str, Any], tmp_path: Path) -> None:
    settings = {"evaluation.every": 100, "log_every": 50, "checkpoint_every": 100} | more
    straight = train(tmp_path / "straight", **settings).run
    stopped = train(tmp_path / "stopped", hook=stop_at(31), **settings)
    assert 0 < stopped.steps < 400
    resumed = ludus.resume(stopped.run).run
    assert_same_run(straight, resumed)
    assert "were restored exactly" in (resumed / "log.txt").read_text()


def test_goals_reach_the_environment_as_numpy() -> None:
    worker = make_worker()
    asked: list[Any] = []
    reward = worker.manager.goal_reward()
    assert reward is not None
    worker.agent.goal_reward = lambda a, b: (asked.append((a, b)), reward(a, b))[1]
    worker.learners[0].cache = worker.seat.cache = worker.agent.make_cache(Rows.all(4))
    worker.run(100)
    assert asked
    for a, b in asked:
        assert isinstance(a, np.ndarray)
        assert a.shape == b.shape == (len(a), 4)
        assert a.dtype == b.dtype == np.int8
