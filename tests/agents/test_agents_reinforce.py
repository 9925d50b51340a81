"""REINFORCE: returns of whole episodes by hand, with and without a baseline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from agents_setup import make_worker

from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.rows import Rows

TOY = "ludus.environments.toy:"
PLAIN: dict[str, Any] = {
    "agent__normalize_observation": False,
    "agent__normalize_reward": False,
    "agent__normalize_advantage": False,
    "agent__gamma": 0.9,
}


def next_batch(worker: Any) -> Batch:
    while not worker.cache.ready():
        collect(worker)
    batch: Batch = worker.cache.read()
    return batch


def returns_by_hand(batch: Batch, values: Any, gamma: float) -> Any:
    """Σ γᵏ r to the end of the episode, and γⁿ V of its last observation if it was cut."""
    reward, real = batch.reward.double().numpy(), batch.real.numpy()
    found = np.zeros_like(reward)
    for t, b in np.ndindex(*reward.shape):
        weight, s = 1.0, t
        while real[t, b]:
            found[t, b] += weight * reward[s, b]
            weight *= gamma
            if batch.terminated[s, b]:
                break
            if batch.truncated[s, b]:
                found[t, b] += weight * values[s + 1, b]
                break
            s += 1
    return found


@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("network", ["mlp", "lstm"])
@pytest.mark.parametrize("limit", [0, 12])
def test_returns_are_those_of_whole_episodes(baseline: bool, network: str, limit: int) -> None:
    more = {"network__body": "lstm"} if network == "lstm" else {}
    more |= {"env__max_episode_steps": limit} if limit else {}
    worker: Any = make_worker("CartPole-v1", "reinforce", agent__baseline=baseline, agent__episodes=2, **PLAIN, **more)
    agent = worker.agent
    begin(worker, 0)
    for _ in range(2):
        batch = next_batch(worker)
        values = np.zeros(batch.first.shape)
        if baseline:
            with torch.no_grad():
                values = agent.outputs(batch.observation, batch.state, batch.first)[0]["value"].squeeze(-1).numpy()
        prepared, real = agent.prepare(batch).experience, batch.real.numpy()
        expected = returns_by_hand(batch, values, 0.9)
        np.testing.assert_allclose(prepared["return"].numpy()[real], expected[real], rtol=1e-4)
        advantage = (expected - values[:-1])[real]
        np.testing.assert_allclose(prepared["advantage"].numpy()[real], advantage, rtol=1e-4, atol=1e-4)
        rows = agent.with_shares(agent.prepare(batch).without_last_observation())
        log_prob = batch.experience["log_prob"].double().numpy()[real]  # learning replays what acting saw
        loss = float(agent.compute_loss(rows)[0]["policy"].detach())
        assert loss == pytest.approx(-(log_prob * advantage).mean(), rel=1e-3, abs=1e-4)
        agent.learn(batch, worker.updater)
    assert bool(batch.truncated.any()) == bool(limit)
    worker.close()


def test_without_a_baseline_there_is_no_value() -> None:
    worker: Any = make_worker("CartPole-v1", "reinforce", agent__baseline=False)
    assert set(worker.agent.networks) == {"actor"}
    begin(worker, 0)
    with pytest.raises(UserError, match="no value function without a baseline"):
        worker.agent.value(worker.seat.env_step, worker.seat.hidden_state)
    with pytest.raises(UserError, match="reinforce learns from whole episodes, not from workers' unrolls"):
        worker.agent.make_unroll(Rows.all(2))
    worker.close()
