"""Reward scaling of replay agents: raw in the replay, divided when drawn, every environment step counted once."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from agents_setup import make_worker
from gymnasium import spaces

from ludus.containers.loop import begin, collect, improve

GAMMA = 0.9


class Paying(gymnasium.Env[Any, Any]):
    """Random rewards around 500, in episodes of 1 to 4 steps; keeps the running discounted returns."""

    returns: ClassVar[list[float]] = []

    def __init__(self, box: bool = True) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if box else spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left, self.running = int(self.np_random.integers(1, 5)), 0.0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        reward = float(np.float32(self.np_random.normal(500, 100)))
        self.running = GAMMA * self.running + reward
        self.returns.append(self.running)
        self.left -= 1
        ends, terminates = self.left == 0, bool(self.np_random.integers(2))
        return np.zeros(2, np.float32), reward, ends and terminates, ends, {}


class PayingChoice(Paying):
    """With a Discrete action."""

    def __init__(self) -> None:
        super().__init__(box=False)


AGENTS = {"dqn": PayingChoice, "discrete_sac": PayingChoice, "sac": Paying, "td3": Paying}
SMALL: dict[str, Any] = {
    "agent__warmup": 40,
    "agent__batch_size": 8,
    "agent__gamma": GAMMA,
    "agent__normalize_reward": True,
}


def trained(agent: str, updates: int = 30, **changes: Any) -> Any:
    Paying.returns.clear()
    worker: Any = make_worker(f"{__name__}:{AGENTS[agent].__name__}", agent, **(SMALL | changes))
    begin(worker, 0)
    for _ in range(updates):
        collect(worker)
        improve(worker)
    return worker


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("per_step", [0.25, 3.0])
def test_every_step_counts_once(agent: str, per_step: float) -> None:
    worker = trained(agent, agent__updates_per_step=per_step)
    while not worker.cache.ready():  # statistics are as of the last update
        collect(worker)
    improve(worker)
    statistics = worker.agent.reward_scaler.statistics
    assert int(statistics.count) == len(Paying.returns) > 80
    assert float(statistics.mean) == pytest.approx(np.mean(Paying.returns), rel=1e-9)
    assert float(statistics.variance) == pytest.approx(np.var(Paying.returns), rel=1e-9)
    worker.close()


@pytest.mark.parametrize("agent", AGENTS)
def test_the_replay_holds_raw_rewards_and_losses_get_scaled_ones(agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = trained(agent)
    seen: list[torch.Tensor] = []
    step = worker.updater.step

    def spy(loss: Any, batch: Any, group: str) -> Any:
        seen.append(batch.reward)
        return step(loss, batch, group)

    monkeypatch.setattr(worker.updater, "step", spy)
    while not worker.cache.ready():
        collect(worker)
    batch = worker.cache.read()
    raw = batch.reward.clone()
    assert raw.mean() > 300
    worker.agent.learn(batch, worker.updater)
    scale = worker.agent.reward_scaler.statistics.scale
    assert scale < 0.01
    torch.testing.assert_close(seen[0], raw * scale)
    assert torch.equal(batch.reward, raw)
    worker.close()


@pytest.mark.parametrize("agent", AGENTS)
def test_values_are_in_the_environments_units(agent: str) -> None:
    worker = trained(agent, updates=1)
    made, last = worker.agent, worker.manager.last_step()
    before = made.value(last, made.initial_state(4))
    made.reward_scaler.statistics.scale *= 0.5
    torch.testing.assert_close(made.value(last, made.initial_state(4)), before * 2)
    worker.close()


def test_a_lost_episode_ends_the_running_return() -> None:
    worker = trained("sac")
    group = next(iter(worker.cache._groups.values()))
    worker.agent.observe(worker.cache, worker.updater)
    assert group.fresh == group.time
    group.carried += 100
    step = worker.manager.last_step()
    lost = torch.tensor([True, False, False, True])
    worker.cache.amend(step._replace(first=step.first | lost, real=step.real & ~lost))
    assert (group.carried == 0).tolist() == (step.first | lost).tolist()
    worker.close()


def test_steps_that_were_overwritten_end_the_running_return() -> None:
    worker = trained("dqn", agent__replay=60, agent__updates_per_step=0.02)
    cache, group = worker.cache, next(iter(worker.cache._groups.values()))
    collect(worker)
    _, returns = cache.fresh([], with_returns=True)
    while group.time - group.fresh <= cache.length:
        collect(worker)
    Paying.returns.clear()
    group.carried += 1e9
    _, returns = cache.fresh([], with_returns=True)
    assert 0 < len(returns) < 60
    assert returns.max() < 1e6
    worker.close()
