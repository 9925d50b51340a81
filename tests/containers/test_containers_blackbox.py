"""The black box: what it keeps, when it speaks, and that what it saved redoes the learning to the last bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from containers_setup import TOY, make_worker
from gymnasium import spaces
from torch import Tensor, nn

from ludus.containers.blackbox import FOLDER, BlackBox, copied
from ludus.containers.local import LocalWorker
from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.experience.validate import Fault, find_fault
from ludus.runs import checkpoint as checkpoints
from ludus.runs.diagnose import Replay, replay, span
from ludus.runs.folder import RunDirectory
from ludus.settings.config_file import write_config
from ludus.settings.settings import to_flat

NAN = torch.tensor(math.nan)


def settled(run: Path, environment: str = "CartPole-v1", agent: str = "ppo", **changes: Any) -> LocalWorker:
    """A worker with a black box in ``run``, a few updates old."""
    worker = make_worker(environment, agent, **changes)
    box = BlackBox(worker.agent, worker.updater, worker.manager, run)
    run.mkdir(exist_ok=True)
    write_config(run / "config.toml", to_flat(worker.settings), {}, signs=True)
    begin(worker, 0)
    for _ in range(3):
        learn(worker, box)
    worker.black_box = box
    return worker


def learn(worker: LocalWorker, box: BlackBox) -> dict[str, Tensor]:
    box.step += collect(worker)
    batch = worker.cache.read()
    box.before(batch)
    metrics = worker.agent.learn(batch, worker.updater).metrics
    box.after(metrics)
    return metrics


def spoil(worker: LocalWorker, run: Path) -> tuple[dict[str, float], Replay]:
    """Learn once more, say that it failed though it did not, and replay it."""
    box, worker.black_box = worker.black_box, None  # type: ignore[assignment]
    box.step += collect(worker)
    batch = worker.cache.read()
    box.before(batch)
    metrics = worker.agent.learn(batch, worker.updater).metrics
    with pytest.raises(UserError, match="loss/made_up is nan"):
        box.after(metrics | {"loss/made_up": NAN})
    worker.close()
    generator = torch.get_rng_state()
    found = replay(RunDirectory(run))
    assert torch.equal(torch.get_rng_state(), generator)
    return {name: float(x) for name, x in metrics.items()}, found


class Dropout(nn.Module):
    """Random numbers, and statistics that move, of a network's own."""

    def __init__(self, inputs: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs["observation"][0], 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh()
        )

    def forward(self, observation: Tensor) -> Tensor:
        result: Tensor = self.layers(observation)
        return result


class Pictures(gymnasium.Env[Any, Any]):
    """Noise to look at."""

    observation_space = spaces.Box(0, 255, (3, 36, 36), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._look(), {}

    def step(self, action: Any) -> Any:
        return self._look(), float(action), self.np_random.random() < 0.2, False, {}

    def _look(self) -> Any:
        return self.np_random.integers(0, 255, (3, 36, 36), np.uint8)


SMALL_ROLLOUT = {"agent__rollout": 4, "env__num": 2}
NORMALIZED = {"agent__normalize_observation": True, "agent__normalize_reward": True}
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {"agent__learning_rate_schedule": "kl", "agent__target_kl": 0.01},
    "a2c, normalized": {"agent": "a2c"} | NORMALIZED,
    "ppo, continuous, normalized": {"environment": "Pendulum-v1"} | NORMALIZED,
    "ppo, memory": {"network__body": "lstm", "environment": "Pendulum-v1"},
    "a2c, memory, normalized": {"network__body": "lstm", "agent": "a2c"} | NORMALIZED,
    "ppo, pictures": {"environment": f"{__name__}:Pictures"} | SMALL_ROLLOUT,
    "a2c, masks": {"agent": "a2c", "environment": TOY + "MaskedEnv"},
    "ppo, several actions": {"environment": TOY + "MixedActionEnv"},
    "a network of one's own": {"network__name": f"{__name__}:Dropout"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_learning_is_redone_to_the_last_bit(tmp_path: Path, kind: str) -> None:
    worker = settled(tmp_path / "run", **KINDS[kind])
    metrics, found = spoil(worker, tmp_path / "run")
    assert found.reproduced == "no"  # all was well
    assert all(math.isfinite(x) for x in metrics.values())
    assert found.again == metrics
    assert len(found.steps) == metrics.get("optimizer_steps", 1)


def test_what_is_saved_is_the_state_before_the_learning(tmp_path: Path) -> None:
    worker = settled(tmp_path / "run", "Pendulum-v1", **NORMALIZED)
    agent, updater = worker.agent, worker.updater
    before = copied({"agent": dict(agent.state_dict()), "updater": updater.state_dict()}, None)
    minibatches: Tensor = agent.generator.get_state()  # type: ignore[union-attr, operator]
    spoil(worker, tmp_path / "run")
    state, meta = checkpoints.load(tmp_path / "run" / FOLDER)
    saved = state["parameters"] | state["buffers"]
    assert all(torch.equal(x, saved[name]) for name, x in before["agent"].items())
    assert not all(torch.equal(x, agent.state_dict()[name]) for name, x in before["agent"].items())
    assert state["updater"]["learning_rate"] == before["updater"]["learning_rate"]
    assert state["updater"]["steps"] == before["updater"]["steps"]
    assert all(torch.equal(x, state["updater"]["moments"][name]) for name, x in before["updater"]["moments"].items())
    assert torch.equal(state["generators"]["generator"], minibatches)
    assert "clip" in saved  # which no checkpoint holds
    assert meta["step"] > 0


def test_the_copy_takes_no_new_memory(tmp_path: Path) -> None:
    worker = settled(tmp_path / "run")
    kept = worker.black_box._kept
    where = [x.data_ptr() for x in (kept["flat"], *kept["updater"]["moments"].values(), *kept["buffers"].values())]
    learn(worker, worker.black_box)
    kept = worker.black_box._kept
    again = [x.data_ptr() for x in (kept["flat"], *kept["updater"]["moments"].values(), *kept["buffers"].values())]
    assert again == where
    worker.close()


def test_a_copy_of_another_shape_is_new() -> None:
    held = {"a": torch.zeros(2), "b": torch.zeros(2), "c": 1}
    made = copied({"a": torch.ones(2), "b": torch.ones(3), "d": [torch.ones(1), None]}, held)
    assert made["a"] is held["a"]
    assert torch.equal(made["b"], torch.ones(3))
    assert made.keys() == {"a", "b", "d"}


def test_good_numbers_pass_even_where_their_sum_overflows(tmp_path: Path) -> None:
    worker = settled(tmp_path / "run")
    with torch.no_grad():
        worker.updater.flat.value.fill_(3e38)  # type: ignore[attr-defined]
    worker.black_box.after({"loss/policy": torch.tensor(3e38), "kl": NAN, "explained_variance": NAN})
    assert not worker.black_box.saved
    assert not (tmp_path / "run" / FOLDER).exists()
    worker.close()


def test_a_parameter_that_no_metric_tells_of_is_found(tmp_path: Path) -> None:
    worker = settled(tmp_path / "run")
    with torch.no_grad():
        dict(worker.agent.named_parameters())["networks.critic.projections.value.bias"].fill_(-math.inf)
    with pytest.raises(
        UserError, match=r"^Training diverged: parameters are not finite at step \d+; .* `ludus replay "
    ):
        worker.black_box.after({})
    state, _ = checkpoints.load(tmp_path / "run" / FOLDER)
    assert state["wrong"]["parameters"] == ["networks.critic.projections.value.bias"]
    worker.close()


def test_without_a_run_nothing_is_written_and_no_command_promised(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    worker = make_worker("CartPole-v1")
    box = BlackBox(worker.agent, worker.updater, worker.manager)
    with pytest.raises(UserError, match=r"^Training diverged: loss/value is nan .*are whole\.$"):
        box.after({"loss/value": NAN})
    assert list(tmp_path.iterdir()) == []
    worker.close()


def test_a_place_that_takes_no_file_is_told_after_what_ended_the_run(tmp_path: Path) -> None:
    worker = settled(tmp_path / "run")
    box = BlackBox(worker.agent, worker.updater, worker.manager, tmp_path / "run" / "config.toml")
    box.before(worker.cache.read())
    with pytest.raises(UserError, match=r"^Training diverged: loss/value is nan .*could not be saved: .*cannot be wr"):
        box.after({"loss/value": NAN})
    assert not box.saved
    worker.close()


def test_images_come_back_as_they_lay_in_memory(tmp_path: Path) -> None:
    worker = settled(tmp_path / "run", f"{__name__}:Pictures", **SMALL_ROLLOUT)
    strides = worker.cache.read().observation["observation"].stride()
    _, found = spoil(worker, tmp_path / "run")
    assert found.batch.observation["observation"].stride() == strides
    assert not found.batch.observation["observation"].is_contiguous()


def filled(time: int = 5, rows: int = 3) -> Batch:
    zeros = torch.zeros(time, rows)
    no = torch.zeros(time, rows, dtype=torch.bool)
    first = torch.zeros(time + 1, rows, dtype=torch.bool)
    seen = {"speed": torch.zeros(time + 1, rows, 2), "camera": torch.zeros(time + 1, rows, 2, 2, dtype=torch.uint8)}
    return Batch(seen, first, {"action": zeros}, zeros.clone(), no, no, zeros, zeros, {})


def test_the_first_bad_number_in_the_order_of_steps_is_found() -> None:
    batch = filled()
    assert find_fault(batch) is None
    batch.observation["speed"][4, 1, 0] = math.inf
    batch.reward[4, 0] = -math.inf
    assert find_fault(batch) == Fault("observation", "speed", 4, 1, [0], math.inf)
    batch.reward[3, 2] = -math.inf  # came with observation 4: told of after it
    assert find_fault(batch) == Fault("observation", "speed", 4, 1, [0], math.inf)
    batch.reward[2, 2] = -math.inf
    assert find_fault(batch) == Fault("reward", "", 2, 2, [], -math.inf)


def test_a_span_leaves_out_what_is_no_number() -> None:
    x = torch.tensor([1.0, math.nan, -2.0, math.inf, -math.inf])
    assert span(x, torch.tensor([7])) == (-2.0, 7.0, 1, 2, 6)
    assert math.isnan(span().low)


@pytest.mark.parametrize("agent", ["dqn", "rainbow", "td3"])
def test_what_came_before_a_failure_is_learned_again_to_the_bit(agent: str, tmp_path: Path) -> None:
    """Of many short learnings only every third begins with a copy; the fifth fails."""
    environment = "Pendulum-v1" if agent == "td3" else "CartPole-v1"
    small = {"agent__warmup": 40, "agent__batch_size": 16, "agent__replay": 400}
    worker = make_worker(environment, agent, **small)
    box = worker.black_box = BlackBox(worker.agent, worker.updater, worker.manager, tmp_path, every=3)
    begin(worker, 0)
    before: dict[str, torch.Tensor] = {}
    for _ in range(5):
        while not worker.cache.ready():
            collect(worker)
        batch = worker.cache.read()
        worker.updater.learning_rate *= 0.9
        box.before(batch)
        before = {name: x.clone() for name, x in worker.agent.state_dict().items() if isinstance(x, torch.Tensor)}
        moments = {name: x.clone() for name, x in worker.updater.state_dict()["moments"].items()}
        worker.agent.learn(batch, worker.updater)
    with pytest.raises(UserError, match="Training diverged"):
        box.after({"loss/value": torch.tensor(torch.nan)})
    state, _ = checkpoints.load(tmp_path / FOLDER)
    for name, x in state["parameters"].items():
        assert torch.equal(x, before[name]), name
    for name, x in state["updater"]["moments"].items():
        assert torch.equal(x, moments[name]), name
    assert torch.equal(state["batch"]["reward"], batch.reward)
    worker.close()
