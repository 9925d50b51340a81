"""A worker that fills unrolls in shared memory and a learner that receives them are the local worker, taken apart."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from containers_setup import make_worker

from ludus.agents.actor_critic import ActorCritic
from ludus.containers.build import build_agent
from ludus.containers.local import LocalWorker
from ludus.containers.loop import begin, collect, improve
from ludus.core.agent import Agent
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.core.seat import Seat
from ludus.core.types import Tensors
from ludus.logging.clock import Clock
from ludus.parallel.shared_memory import Block

SMALL: dict[str, Any] = {"agent__rollout": 8, "agent__warmup": 64, "agent__replay": 512, "agent__replay_ratio": 1.0}


class Worker:
    """Steps environments with an agent of its own, in memory that it was given."""

    def __init__(self, parts: LocalWorker, rows: Rows, memory: Tensors | None = None) -> None:
        torch.manual_seed(99)  # other weights than the learner's, until it is given those
        manager = parts.manager
        self.agent = build_agent(parts.settings, manager.observation, manager.action, torch.device("cpu"))
        self.unroll = self.agent.make_unroll(rows, memory)
        self.seats = [Seat(self.agent, self.unroll, parts.seat.noise, rows, parts.device)]
        self.manager, self.clock = manager, Clock()

    def take_weights(self, agent: torch.nn.Module, version: int) -> None:
        self.agent.load_state_dict(agent.state_dict())
        self.unroll.version = version


def shared_memory(make: Any) -> tuple[Block, Block]:
    """One block as two processes map it, with room for what an unroll of these settings holds."""
    parts = make()
    worker = Worker(parts, Rows.all(4))
    begin(worker, 0)
    collect(worker)
    tensors = worker.unroll.submit().tensors
    parts.close()
    fields = {name: (tuple(x.shape), str(np.dtype(x.numpy().dtype))) for name, x in tensors.items()}
    block = Block(fields)
    return block, Block(fields, os.dup(block.fd))


@pytest.mark.parametrize("network", ["mlp", "lstm"])
@pytest.mark.parametrize("scaled", [False, True], ids=["rewards", "scaled rewards"])
def test_a_worker_and_a_learner_in_lockstep_are_the_local_worker(network: str, scaled: bool) -> None:
    body = {"network__body": "lstm"} if network == "lstm" else {}

    def make() -> LocalWorker:
        torch.manual_seed(0)
        return make_worker("CartPole-v1", "acer_vtrace", agent__normalize_reward=scaled, **SMALL, **body)

    local = make()
    begin(local, 5)
    steps = 0
    for _ in range(20):
        steps += collect(local)
        improve(local)

    written, seen = shared_memory(make)
    learner = make()
    memory = {name: torch.from_numpy(x) for name, x in written.arrays.items()}
    worker = Worker(learner, Rows.all(4), memory)
    worker.take_weights(learner.agent, 0)
    begin(worker, 5)
    for update in range(20):
        steps -= collect(worker)
        unroll = worker.unroll.submit()
        assert all(x.data_ptr() == memory[name].data_ptr() for name, x in unroll.tensors.items())
        through = {name: torch.from_numpy(seen[name]) for name in unroll.tensors}
        learner.cache.receive(unroll._replace(tensors=through))
        improve(learner)
        worker.take_weights(learner.agent, update + 1)
    assert steps == 0
    assert learner.cache.metrics() == local.cache.metrics()
    assert learner.cache.metrics()["replay/ratio"] > 0
    expected = local.agent.state_dict()
    for name, x in learner.agent.state_dict().items():
        assert torch.equal(x, expected[name]), name
    for part in (local, learner, written, seen):
        part.close()


def test_columns_are_filled_in_the_order_of_arrival_with_their_versions() -> None:
    parts = make_worker("CartPole-v1", "acer_vtrace", env__num=2, **SMALL)
    worker = Worker(parts, Rows(4, 6, 8))
    begin(worker, 0)
    cache = parts.agent.make_cache(Rows.all(6))
    rewards = []
    for version in (3, 4, 4):
        worker.unroll.version = version
        assert not cache.ready()
        collect(worker)
        unroll = worker.unroll.submit()
        assert unroll.rows == Rows(4, 6, 8)
        rewards.append(unroll.tensors["reward"].clone())
        cache.receive(unroll)
    assert cache.ready()
    batch = cache.read()
    assert batch.version is not None
    assert batch.version.tolist() == [3, 3, 4, 4, 4, 4]
    assert torch.equal(batch.reward, torch.cat(rewards, 1))
    parts.close()


def test_what_has_no_unrolls_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker("CartPole-v1", "ppo")
    monkeypatch.setattr(ActorCritic, "make_unroll", Agent.make_unroll)
    with pytest.raises(UserError, match="cannot learn from workers' unrolls"):
        worker.agent.make_unroll(Rows.all(4))
    worker.close()


def test_ppo_learns_from_a_submitted_unroll() -> None:
    parts = make_worker("CartPole-v1", "ppo")
    rows = Rows.all(4)
    unroll = parts.agent.make_unroll(rows)
    loop = SimpleNamespace(
        seats=[Seat(parts.agent, unroll, parts.seat.noise, rows, parts.device)], manager=parts.manager, clock=Clock()
    )
    begin(loop, 0)
    collect(loop)
    parts.cache.receive(unroll.submit())
    assert improve(parts)[1] == 1
    parts.close()
