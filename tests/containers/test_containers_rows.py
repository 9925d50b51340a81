"""A row has the same episodes, random numbers and running return in whatever process it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from containers_setup import make_worker

from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch
from ludus.core.rows import Rows
from ludus.environments.config import EnvConfig
from ludus.managers.make import make_manager

WHOLE, PART = Rows.all(6), Rows(2, 5, 6)
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", {}),
    "acer": ("CartPole-v1", {}),
    "dqn": ("CartPole-v1", {"agent__epsilon_ladder": 7.0, "agent__values": "implicit"}),
    "discrete_sac": ("CartPole-v1", {}),
    "sac": ("Pendulum-v1", {}),
    "ddpg": ("Pendulum-v1", {}),
    "ars": ("CartPole-v1", {}),
    "pqn": ("CartPole-v1", {}),
}


@pytest.mark.parametrize("name", AGENTS)
def test_noise_follows_the_row_of_the_whole_run(name: str) -> None:
    environment, changes = AGENTS[name]
    worker = make_worker(environment, name, **changes)
    whole, part, resumed = (
        worker.agent.make_noise(rows, torch.Generator().manual_seed(3)) for rows in (WHOLE, PART, PART)
    )
    for step in range(200):  # more than are drawn at once
        if step == 150:
            resumed.load_state_dict(part.state_dict())
        numbers = [source.next() for source in ((whole, part) if step < 150 else (whole, part, resumed))]
        for kind, x in numbers[0].items():
            assert all(torch.equal(x[PART.slice], other[kind]) for other in numbers[1:]), kind
    worker.close()


@pytest.mark.parametrize("backend", ["simple", "subproc"])
def test_episodes_follow_the_row_of_the_whole_run(backend: Any) -> None:
    config = EnvConfig(id="CartPole-v1", num=6, backend=backend, workers=2 if backend == "subproc" else 0)
    whole, part = make_manager(config, WHOLE), make_manager(config, PART)
    steps = [manager.reset(7) for manager in (whole, part)]
    for _ in range(30):  # some episodes end
        assert torch.equal(steps[0].observation["observation"][PART.slice], steps[1].observation["observation"])
        assert torch.equal(steps[0].first[PART.slice], steps[1].first)
        steps = [manager.step({"action": torch.ones(manager.batch).long()}) for manager in (whole, part)]
    whole.close()
    part.close()


@pytest.mark.parametrize("backend", ["vector", "tensor"])
def test_environments_with_one_generator_have_a_seed_for_each_range_of_rows(backend: Any) -> None:
    id = "ludus.environments.tensor_toy:TensorCue" if backend == "tensor" else "CartPole-v1"
    config = EnvConfig(id=id, num=64, backend=backend)
    first, second, again = (
        make_manager(config, rows).reset(7).observation["observation"].clone()
        for rows in (Rows(0, 32, 64), Rows(32, 64, 64), Rows(32, 64, 64))
    )
    assert torch.equal(second, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("agent", ["ppo", "a2c"])
def test_running_returns_come_with_the_rows_so_a_learner_may_have_others(agent: str) -> None:
    """Columns in another order and number give the same scale; a learner needs none of its own for each row."""
    scales = []
    for picked in ([0, 1, 2, 3], [3, 1], [0, 2, 0, 1, 3, 3]):
        worker = make_worker("CartPole-v1", agent, agent__normalize_reward=True)
        begin(worker, 0)
        for _ in range(3):
            collect(worker)
            batch = worker.cache.read()
            worker.agent.learn(columns(batch, picked), worker.updater)
        scales.append(float(worker.agent.reward_scaler.statistics.count))  # type: ignore[union-attr, arg-type]
        worker.close()
    assert scales[0] > scales[1] > 0
    assert scales[2] > scales[0]


def columns(batch: Batch, picked: list[int]) -> Batch:
    def pick(tensors: Any) -> Any:
        return {name: x[:, picked] for name, x in tensors.items()}

    named = {name: pick(getattr(batch, name)) for name in ("observation", "action", "experience", "row_state")}
    plain = ("first", "reward", "terminated", "truncated", "discount", "real", "weight")
    return replace(batch, **named, **{name: getattr(batch, name)[:, picked] for name in plain})
