"""The guard: a gradient that is not finite is not applied, and the run ends with a sentence that says whose fault."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from containers_setup import TOY, make_worker
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ludus.containers.guard import TrainingFailed
from ludus.containers.local import LocalWorker
from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.types import Tensors
from ludus.core.updater import NonFiniteError
from ludus.experience.validate import Fault, check_batch, find_fault, finite_flags
from ludus.runs.failure import FOLDER, save_failure

NAN = torch.tensor(math.nan)
REPLAY = {"agent__warmup": 40, "agent__batch_size": 16, "agent__replay": 400}


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[LocalWorker]:
    """A worker with a full rollout, or whose replay is ready; parametrized indirectly with (environment, agent, …)."""
    environment, agent, changes = getattr(request, "param", ("Pendulum-v1", "ppo", {}))
    made = make_worker(environment, agent, **changes)
    begin(made, 0)
    while not made.cache.ready():
        made.guard.step += collect(made)
    yield made
    made.close()


def spoiled_loss(worker: LocalWorker, number: float, name: str = "compute_loss") -> None:
    """Multiply the losses by a number that is not finite."""
    plain = getattr(worker.agent, name)

    def spoiled(batch: Batch) -> tuple[Tensors, Tensors]:
        losses, metrics = plain(batch)
        return {key: x * number for key, x in losses.items()}, metrics

    spoiled.__name__ = name
    setattr(worker.agent, name, spoiled)


def values(worker: LocalWorker) -> list[Tensor]:
    return [p.detach().clone() for p in worker.agent.parameters()]


EVERY_OPTIMIZER = [
    ("Pendulum-v1", "ppo", {}),
    ("CartPole-v1", "a2c", {"agent__optimizer": "rmsprop"}),
    ("CartPole-v1", "a2c", {"agent__optimizer": "rmsprop_tf"}),
]


@pytest.mark.parametrize("worker", EVERY_OPTIMIZER, indirect=True)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_not_applied(worker: LocalWorker, number: float) -> None:
    before, moments = values(worker), worker.updater.state_dict()["moments"]["square"].clone()
    spoiled_loss(worker, number)
    with pytest.raises(
        TrainingFailed, match=rf"^Training diverged: loss/policy is (nan|inf|-inf) at step {worker.guard.step};"
    ):
        worker.guard.learn(worker.cache.read())
    assert all(map(torch.equal, before, values(worker)))
    assert torch.equal(moments, worker.updater.state_dict()["moments"]["square"])
    assert worker.guard.diverged


@pytest.mark.parametrize(
    ("worker", "advice"),
    [
        (("Pendulum-v1", "ppo", {"agent__normalize_reward": False}), ", or turn on agent.normalize_reward (rewards"),
        (("Pendulum-v1", "ppo", {"agent__normalize_reward": True}), ". Earlier"),
        (("Pendulum-v1", "sac", REPLAY), ", or turn on agent.normalize_reward (rewards reach 1e+03)"),
    ],
    indirect=["worker"],
)
def test_the_message_of_a_divergence_mentions_large_rewards(worker: LocalWorker, advice: str) -> None:
    batch = worker.cache.read()
    batch.reward.fill_(-1000.0)
    spoiled_loss(worker, math.nan, "critic_loss" if hasattr(worker.agent, "critic_loss") else "compute_loss")
    with pytest.raises(TrainingFailed) as caught:
        worker.guard.learn(batch)
    assert f"; lower agent.learning_rate{advice}" in str(caught.value)


@pytest.mark.parametrize("worker", EVERY_OPTIMIZER, indirect=True)
def test_where_nothing_is_read_the_step_is_masked(worker: LocalWorker) -> None:
    """As in a compiled update and on a GPU."""
    updater: Any = worker.updater
    worker.guard.learn(worker.cache.read())
    (part,) = updater.parts.values()
    before = values(worker)
    with torch.no_grad():
        assert not math.isfinite(
            updater.optimize(torch.full_like(updater.flat.value, math.nan), updater.optimizer_tensors(part), part)
        )
        assert all(map(torch.equal, before, values(worker)))
        updater.optimize(torch.ones_like(updater.flat.value), updater.optimizer_tensors(part), part)
    assert all(bool(p.isfinite().all()) for p in values(worker))
    assert not any(map(torch.equal, before, values(worker)))


def test_the_failing_step_is_told(worker: LocalWorker) -> None:
    plain, calls = worker.agent.compute_loss, iter(range(1, 100))

    def third(batch: Batch) -> tuple[Tensors, Tensors]:
        losses, metrics = plain(batch)
        return ({key: x * math.nan for key, x in losses.items()} if next(calls) == 3 else losses), metrics

    worker.agent.compute_loss = third  # type: ignore[method-assign]
    with pytest.raises(TrainingFailed) as caught:
        worker.guard.learn(batch := worker.cache.read())
    assert caught.value.batch is batch
    assert isinstance(caught.value.refused, NonFiniteError)
    assert caught.value.refused.batch.reward.numel() < batch.reward.numel()  # a minibatch
    assert next(calls) == 4


def test_norms_that_a_gpu_has_kept_are_read_after_the_learning(worker: LocalWorker) -> None:
    updater: Any = worker.updater
    updater._norms.append(torch.tensor(math.inf))
    with pytest.raises(TrainingFailed, match="a gradient is not finite at step"):
        worker.guard.learn(worker.cache.read())


def test_a_loss_without_the_updater_is_looked_at(worker: LocalWorker) -> None:
    plain = worker.agent.learn

    def learn(batch: Batch, updater: Any) -> Any:
        return plain(batch, updater)._replace(metrics={"loss/mine": NAN, "kl": NAN})

    worker.agent.learn = learn  # type: ignore[method-assign]
    with pytest.raises(TrainingFailed, match="loss/mine is nan"):
        worker.guard.learn(worker.cache.read())


def test_other_metrics_may_be_what_they_are(worker: LocalWorker) -> None:
    plain = worker.agent.learn
    more = {"kl": NAN, "loss/large": torch.tensor(3e38), "loss/larger": torch.tensor(3e38)}
    worker.agent.learn = lambda *given: plain(*given)._replace(metrics=more)  # type: ignore[method-assign]
    worker.guard.learn(worker.cache.read())
    assert not worker.guard.diverged


@pytest.mark.parametrize("worker", [("CartPole-v1", "dqn", REPLAY), ("Pendulum-v1", "sac", REPLAY)], indirect=True)
def test_a_number_of_the_environment_in_a_replay_is_its_fault(worker: LocalWorker) -> None:
    batch = worker.cache.read()
    batch.reward[0, 3] = math.nan
    before = values(worker)
    with pytest.raises(TrainingFailed, match=r"item 3 of the batch of 16\): a reward is not a finite number"):
        worker.guard.learn(batch)
    assert all(map(torch.equal, before, values(worker)))


def test_a_number_of_the_environment_is_refused_before_learning(worker: LocalWorker) -> None:
    batch = worker.cache.read()
    batch.observation["observation"][2, 1, 2] = math.inf
    worker.agent.learn = lambda *given: pytest.fail("it learned")  # type: ignore[method-assign]
    with pytest.raises(TrainingFailed, match=r'\(row 1\): a number in observation "observation", at element \[2\]'):
        worker.guard.learn(batch)
    assert not worker.guard.diverged


@pytest.mark.parametrize("worker", [(TOY + "MaskedEnv", "ppo", {})], indirect=True)
def test_a_mask_that_allows_nothing_is_refused(worker: LocalWorker) -> None:
    batch = worker.cache.read()
    time, row = batch.real.nonzero()[0].tolist()
    batch.observation["action_mask"][time, row] = False
    with pytest.raises(UserError, match="allows nothing"):
        worker.guard.learn(batch)


class Copies(TorchDispatchMode):
    """Counts tensors of the parameters' size that are copied."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copying = function.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._foreach_copy_)
        if copying and isinstance(args[0], Tensor) and args[0].numel() >= self.size:
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("worker", [("CartPole-v1", "ppo", {"network__hidden": (128, 128)})], indirect=True)
def test_no_state_is_copied(worker: LocalWorker) -> None:
    updater: Any = worker.updater
    worker.agent.learn = lambda *given: type("L", (), {"metrics": {}})()  # type: ignore[method-assign]
    with Copies(updater.flat.value.numel() // 4) as copies:
        worker.guard.learn(worker.cache.read())
    assert copies.count == 0


def test_a_place_that_takes_no_file_is_told_after_what_ended_the_run(worker: LocalWorker, tmp_path: Path) -> None:
    spoiled_loss(worker, math.nan)
    with pytest.raises(TrainingFailed) as caught:
        worker.guard.learn(worker.cache.read())
    assert "ludus diagnose" in str(save_failure(tmp_path, worker, caught.value))
    assert (tmp_path / FOLDER).is_dir()
    (tmp_path / "file").write_text("")
    said = str(save_failure(tmp_path / "file", worker, caught.value))
    assert said.startswith("Training diverged: loss/policy is nan")
    assert "could not be saved: " in said


def filled(time: int = 5, rows: int = 3) -> Batch:
    zeros = torch.zeros(time, rows)
    no = torch.zeros(time, rows, dtype=torch.bool)
    first = torch.zeros(time + 1, rows, dtype=torch.bool)
    seen = {"speed": torch.zeros(time + 1, rows, 2), "camera": torch.zeros(time + 1, rows, 2, 2, dtype=torch.uint8)}
    return Batch(seen, first, {"action": zeros}, zeros.clone(), no, no, zeros, ~no, zeros, {})


def test_the_first_bad_number_in_the_order_of_steps_is_found() -> None:
    batch = filled()
    assert find_fault(batch) is None
    assert all(math.isfinite(x) for x in finite_flags(batch, {}))
    batch.observation["speed"][4, 1, 0] = math.inf
    batch.reward[4, 0] = -math.inf
    assert find_fault(batch) == Fault("observation", "speed", 4, 1, [0], math.inf)
    assert not all(math.isfinite(x) for x in finite_flags(batch, {}))
    batch.reward[3, 2] = -math.inf  # came with observation 4: told of after it
    assert find_fault(batch) == Fault("observation", "speed", 4, 1, [0], math.inf)
    batch.reward[2, 2] = -math.inf
    assert find_fault(batch) == Fault("reward", "", 2, 2, [], -math.inf)


def test_a_sum_that_overflows_is_no_fault() -> None:
    batch = filled()
    batch.reward.fill_(3e38)
    assert not all(math.isfinite(x) for x in finite_flags(batch, {}))
    check_batch(batch, {}, "world")
