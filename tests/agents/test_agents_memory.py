"""Recurrent pieces of every kind and at every place: learning sees the hidden states that acting had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from actor_setup import make_worker as make_replay_worker
from agents_setup import make_worker
from test_agents_consistency import assert_replayed

from ludus.containers.loop import begin, collect, improve
from ludus.core.batch import Batch

CATCH = "ludus.environments.image_toy:CatchEnv"
MEMORIES: dict[str, tuple[str, dict[str, Any]]] = {
    "source, body and head": (
        "CartPole-v1",
        {"network__net1d": "gru", "network__body": "min_gru", "network__head1d": "layer_norm_lstm"},
    ),
    "transformer": ("CartPole-v1", {"network__body": "gtrxl(width=8, heads=2, memory=5)"}),
    "images": (
        CATCH,
        {"network__net3d": "conv_lstm(channels=2)", "network__body": "gru(size=4)", "network__shared": "yes"},
    ),
    "map": (
        CATCH,
        {"network__net3d": "identity3d", "network__body": "conv_lstm(channels=2)", "network__head1d": "lstm"},
    ),
    "shared sources": ("CartPole-v1", {"network__net1d": "gru", "network__body": "mlp", "network__shared": "sources"}),
    "shared body": ("CartPole-v1", {"network__body": "gru", "network__head1d": "mlp", "network__shared": "body"}),
}


@pytest.mark.parametrize("agent", ["ppo", "a2c", "vtrace"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_rollouts_are_replayed_with_the_states_of_acting(memory: str, agent: str) -> None:
    environment, changes = MEMORIES[memory]
    worker = make_worker(environment, agent, agent__rollout=8, **changes)
    try:
        begin(worker, 3)
        for _ in range(2):
            collect(worker)
            batch = worker.cache.read()
            if agent != "vtrace":
                assert_replayed(worker.agent, batch)
            learned = worker.agent.learn(batch, worker.updater)
            assert all(torch.isfinite(x) for x in learned.metrics.values())
    finally:
        worker.close()


@pytest.mark.parametrize("memory", MEMORIES)
def test_acer_replays_the_states_of_acting(memory: str) -> None:
    environment, changes = MEMORIES[memory]
    worker = make_worker(environment, "acer", agent__rollout=6, agent__warmup=0, **changes)
    try:
        begin(worker, 3)
        collect(worker)
        batch = worker.cache.read()
        with torch.no_grad():
            seen = {name: x[:-1] for name, x in batch.observation.items()}
            _, state = worker.agent.outputs(seen, batch.state, batch.first[:-1])  # type: ignore[operator]
        torch.testing.assert_close(dict(state), dict(batch.last_state), rtol=0, atol=1e-5)
        worker.agent.learn(batch, worker.updater)
        collect(worker)
        metrics, _ = improve(worker)
        assert all(torch.isfinite(x) for x in metrics.values())
    finally:
        worker.close()


REPLAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "source and head": ("vector", {"network__net1d": "gru(size=6)", "network__head1d": "min_gru(size=6)"}),
    "transformer": ("vector", {"network__body": "gtrxl(width=8, heads=2, memory=5)"}),
    "map": (
        "image",
        {"network__net3d": "identity3d", "network__body": "conv_lstm(channels=2)", "network__head1d": "gru(size=4)"},
    ),
}
SEQUENCES = {"agent__sequence": 6, "agent__burn_in": 3, "agent__overlap": 3, "agent__replay": 500}


def filled(agent: str, memory: str, steps: int = 40) -> tuple[Any, Batch, dict[int, Any]]:
    """A worker that acted, a batch from its replay, and the hidden states that it had at each time."""
    kind, changes = REPLAYS[memory]
    environment = {"vector": {"sac": "Pendulum-v1", "td3": "Pendulum-v1"}.get(agent, "CartPole-v1"), "image": CATCH}
    slow = {"agent__updates_per_step": 1e-3, "agent__batch_size": 8, "agent__warmup": 8, "env__num": 4}
    worker: Any = make_replay_worker(environment[kind], agent, **SEQUENCES, **slow, **changes)
    begin(worker, 0)
    states = {}
    for time in range(steps):
        states[time] = worker.seat.hidden_state
        step = worker.agent.act(worker.seat.env_step, worker.seat.hidden_state, worker.seat.noise.next())
        worker.cache.agent_write(step)
        worker.seat.env_step, worker.seat.hidden_state = worker.manager.step(step.action), step.state
        worker.cache.env_write(worker.seat.env_step, step.state)
    return worker, worker.cache.read(), states


@pytest.mark.parametrize("memory", REPLAYS)
def test_a_burn_in_gives_the_states_of_acting(memory: str) -> None:
    worker, batch, states = filled("dqn", memory)
    warm = worker.agent.burn_in_state(batch, "q")
    assert warm
    time, row = (batch.index // 4).tolist(), (batch.index % 4).tolist()
    for column, (at, of) in enumerate(zip(time, row, strict=True)):
        for name, x in warm.items():
            torch.testing.assert_close(x[column], states[at + 3][name][of], rtol=1e-4, atol=1e-5)
    worker.close()


@pytest.mark.parametrize(
    ("agent", "memory"),
    [("dqn", "source and head"), ("dqn", "map"), ("sac", "source and head"), ("sac", "transformer"),
     ("td3", "transformer"), ("discrete_sac", "map")],
)  # fmt: skip
def test_replay_agents_learn_with_any_memory(agent: str, memory: str) -> None:
    worker, batch, _ = filled(agent, memory)
    learned = worker.agent.learn(batch, worker.updater)
    assert all(torch.isfinite(x).all() for x in learned.metrics.values())
    worker.close()
