"""Several ranks learn what one rank learns from all of their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from containers_setup import make_worker
from distrib_setup import RANKS, ROWS, DistribUpdater, made_up_batch, on_ranks
from torch import Tensor

from ludus.containers.loop import begin, collect, improve
from ludus.containers.updater import LocalUpdater
from ludus.core.types import State

NORMALIZED: dict[str, Any] = {
    "agent__normalize_advantage": True,
    "agent__normalize_observation": True,
    "agent__normalize_reward": True,
    "network__hidden": (16,),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {  # one minibatch, so that ranks change nothing
    "ppo": ("ppo", {"agent__minibatches": 1, "agent__epochs": 3}),
    "a2c": ("a2c", {}),
    "a2c by n steps": ("a2c", {"agent__n_step": 3}),
    "trpo": ("trpo", {"agent__minibatches": 1, "agent__value_epochs": 3, "agent__cg_iterations": 4}),
}
PARTS = {"agent__minibatches": 3, "agent__epochs": 4, "agent__target_kl": 0.02}


def learn(rank: int | None, agent: str, changes: dict[str, Any]) -> dict[str, Tensor]:
    """What an agent is after some updates: its tensors, and the last metrics; ``rank`` None: alone, with all rows."""
    rows = slice(0, RANKS * ROWS) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    size = {"env__num": rows.stop - rows.start, "agent__rollout": 12}
    worker: Any = make_worker("CartPole-v1", agent, **(NORMALIZED | size | changes))
    updater = LocalUpdater(worker.agent) if rank is None else DistribUpdater(worker.agent)
    for seed in range(4):
        metrics = worker.agent.learn(made_up_batch(seed, rows), updater).metrics
    worker.close()
    state = {
        name: x for name, x in worker.agent.state_dict().items() if isinstance(x, Tensor) and "carried" not in name
    }
    return state | {f"metrics/{name}": x for name, x in metrics.items()} | {"rate": torch.tensor(updater.learning_rate)}


def learn_from_a_replay(rank: int) -> dict[str, Tensor]:
    """The number of updates, real steps and parameters of a DQN whose ranks play different episodes."""
    small = {"env__num": 2, "agent__warmup": 40, "agent__batch_size": 8, "agent__updates_per_step": 0.5}
    small |= {"agent__normalize_observation": True}
    worker: Any = make_worker("CartPole-v1", "dqn", network__hidden=(16,), **small)
    worker.updater = worker.guard.updater = DistribUpdater(worker.agent)
    begin(worker, 100 * rank)
    updates = steps = 0
    for _ in range(60):
        steps += collect(worker)
        updates += improve(worker)[1]
    worker.close()
    flat = torch.cat([p.detach().flatten() for p in worker.agent.parameters()])
    statistics = {name: x for name, x in worker.agent.state_dict().items() if name.startswith("normalizer.")}
    return {"updates": torch.tensor(updates), "steps": torch.tensor(steps), "parameters": flat} | statistics


def learn_by_search(rank: int | None) -> dict[str, Tensor]:
    """What ARS is after some updates; its directions are played by rows of all ranks."""
    rows = slice(0, RANKS * ROWS) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    worker: Any = make_worker("CartPole-v1", "ars", env__num=rows.stop - rows.start)
    updater = LocalUpdater(worker.agent) if rank is None else DistribUpdater(worker.agent)
    for seed in range(3):
        batch = made_up_batch(seed, rows)
        batch.experience["row"] = torch.arange(rows.start, rows.stop).expand_as(batch.reward)
        metrics = worker.agent.learn(batch, updater).metrics
    worker.close()
    state = {name: x for name, x in worker.agent.state_dict().items() if isinstance(x, Tensor)}
    return state | {f"metrics/{name}": x for name, x in metrics.items()}


def learn_all(rank: int) -> State:
    """What all tests below look at, from one start of the ranks."""
    whole = {name: learn(rank, *case) for name, case in WHOLE.items()}
    others = {"minibatches": learn(rank, "ppo", PARTS), "replay": learn_from_a_replay(rank)}
    return whole | others | {"ars": learn_by_search(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    return on_ranks(learn_all, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [*WHOLE, "ars"])
def test_two_ranks_with_one_minibatch_are_one_rank_with_all_rows(ranks: list[State], name: str) -> None:
    one, other = (state[name] for state in ranks)
    alone = learn_by_search(None) if name == "ars" else learn(None, *WHOLE[name])
    assert sorted(one) == sorted(alone)
    for key, x in alone.items():
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
        torch.testing.assert_close(one[key], x, rtol=1e-5, atol=1e-5, msg=lambda told, key=key: f"{key}: {told}")


def test_with_several_minibatches_the_ranks_stay_equal(ranks: list[State]) -> None:
    one, other = (state["minibatches"] for state in ranks)
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert float(one["metrics/optimizer_steps"]) < 12  # the ranks agreed to stop


def test_ranks_of_a_replay_agent_make_the_same_number_of_updates(ranks: list[State]) -> None:
    one, other = (state["replay"] for state in ranks)
    assert one["steps"] != other["steps"]
    assert one["updates"] == other["updates"] > 10
    assert torch.equal(one["parameters"], other["parameters"])
    counted = "normalizer.statistics.observation/observation.count"
    assert 0 < one[counted] <= one["steps"] + other["steps"]
    assert all(torch.equal(x, other[name]) for name, x in one.items() if name.startswith("normalizer."))
