"""Ops on rewards change what the agent learns from, and not what is logged."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from containers_setup import make_worker
from gymnasium import spaces

from ludus.containers.loop import begin, collect
from ludus.core.errors import UserError
from ludus.preprocess.config import PreprocessConfig
from ludus.preprocess.rewards import make_reward_ops, preprocessed_goal_reward


class Rich(gymnasium.Env[Any, Any]):
    """Pays 50 at every step, in episodes of three steps."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.zeros(2, np.float32), 50.0, self.time == 3, False, {}


def test_ops_apply_in_order() -> None:
    ops = make_reward_ops(["scale(by=0.5), clip(low=-1, high=2)", "scale(by=10)"])
    assert ops is not None
    assert ops(torch.tensor([-8.0, 1.0, 9.0])).tolist() == [-10.0, 5.0, 20.0]
    sign = make_reward_ops(["sign"])
    assert sign is not None
    assert sign(torch.tensor([-8.0, 0.0, 9.0])).tolist() == [-1.0, 0.0, 1.0]
    assert make_reward_ops([]) is None
    reward = preprocessed_goal_reward(lambda a, b: (a - b, None), ops)
    assert reward(np.array([3.0]), np.array([1.0]))[0].tolist() == [10.0]


@pytest.mark.parametrize(
    ("agent", "more"), [("a2c", {"agent__rollout": 8}), ("dqn", {"agent__warmup": 8, "agent__n_step": 2})]
)
def test_caches_get_processed_rewards_and_returns_are_the_environments(agent: str, more: dict[str, Any]) -> None:
    small = {"agent__batch_size": 4} if agent == "dqn" else {}
    worker: Any = make_worker(f"{__name__}:Rich", agent, preprocess__reward=("clip(low=-1, high=1)",), **small, **more)
    begin(worker, 0)
    while not worker.cache.ready():
        collect(worker)
    batch = worker.cache.read()
    gamma = worker.settings.agent.gamma
    allowed = {0.0, 1.0} if agent == "a2c" else {1.0, 1 + gamma}
    assert all(min(abs(x - y) for y in allowed) < 1e-6 for x in batch.reward[batch.real].tolist())
    assert {episode.reward for episode in worker.manager.episodes()} == {150.0}
    worker.close()


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("clip(low=-1)", "cannot be applied to rewards: missing 1 required keyword-only argument: 'high'"),
        ("scale(by=0)", "by is 0"),
        ("scale(to=2)", r'preprocess.reward "scale\(to=2\)" has no argument "to"'),
    ],
)
def test_wrong_arguments_are_refused(op: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_reward_ops([op])
    with pytest.raises(UserError, match='there is no op "stack"'):
        PreprocessConfig(reward=("stack(n=2)",)).validate()
