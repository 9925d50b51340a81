"""Offline agents learn more from recorded episodes than the policy that played them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demonstrations import record_to
from learning_tasks import TOY, UNWATCHED
from recorded_tasks import (
    DATA,
    TASKS,
    record_demonstrations,
    record_mixed,
    score,
    train_car,
    train_expert,
)

import ludus

QUICK: dict[str, Any] = UNWATCHED | {
    "network.hidden": (32, 32),
    "network.activation": "relu",
    "agent.gamma": 0.9,
    "agent.batch_size": 64,
    "agent.learning_rate": 2e-3,
}
LIGHT = {"agent.conservative_samples": 2, "agent.actor_learning_rate": 2e-3, "agent.conservative_coef": 1.0}
TOYS: dict[str, tuple[str, int, dict[str, Any]]] = {  # agent → toy, updates and settings
    "td3_bc": ("TargetEnv", 800, {}),
    "cql": ("TargetEnv", 600, LIGHT),
    "iql": ("TargetEnv", 600, {}),
    "discrete_cql": ("MaskedEnv", 400, {"agent.target_every": 50}),
    "discrete iql": ("MaskedEnv", 400, {}),
}
TARGETS = {"TargetEnv": -0.3, "MaskedEnv": 7.8}  # mean returns; those of the data: -13 and 2.7, imitated: -2.7 and 2.7


def record_random(toy: str, path: Path) -> str:
    """Write episodes of a policy that takes all allowed actions alike."""
    rng = np.random.default_rng(0)
    if toy == "MaskedEnv":
        return record_to(path, TOY + toy, lambda x: {"action": rng.choice(np.flatnonzero(x["action_mask"]), 1)}, 300)
    return record_to(path, TOY + toy, lambda x: {"action": rng.uniform(-2, 2, (1, 2)).astype(np.float32)}, 400)


@pytest.mark.parametrize("name", TOYS)
def test_the_toy_is_learned_from_random_episodes(name: str, tmp_path: Path) -> None:
    toy, updates, settings = TOYS[name]
    path = record_random(toy, tmp_path / "random.npz")
    given = QUICK | {"runs": str(tmp_path), "data.path": path} | settings
    result = ludus.train(TOY + toy, name.split()[-1], nb_step=updates, settings=given)
    assert result.evaluation is not None
    assert result.evaluation.mean >= TARGETS[toy], result.evaluation.mean


SEEDS = range(5)
MARGINS = {"pendulum": 100.0, "cartpole": 50.0}  # of mean returns over that of imitation


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ludus.Player]:
    """The trained policies, which the slow tests share."""
    return {name: train_expert(name, tmp_path_factory.mktemp(name)) for name in DATA}


@pytest.fixture(scope="module")
def mixed(experts: dict[str, ludus.Player], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    """Files of mixed data, and the mean return of behaviour cloning on each."""
    found = {}
    for name, expert in experts.items():
        folder = tmp_path_factory.mktemp(f"mixed {name}")
        path = record_mixed(name, expert, folder)
        found[name] = path, float(np.mean([score(TASKS[f"{name}/bc"], path, seed, folder) for seed in SEEDS]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TASKS if not name.endswith("/bc")])
def test_more_than_imitation_is_learned_from_mixed_data(
    name: str, mixed: dict[str, tuple[str, float]], tmp_path: Path
) -> None:
    task = TASKS[name]
    path, imitated = mixed[task.data]
    returns = [score(task, path, seed, tmp_path) for seed in SEEDS]
    assert np.mean(returns) > imitated + MARGINS[task.data], (returns, imitated)


@pytest.mark.slow
def test_demonstrations_take_sac_to_a_goal_that_it_does_not_find_alone(tmp_path: Path) -> None:
    demonstrations = record_demonstrations(tmp_path / "demos.npz")
    for seed in SEEDS:
        assert train_car(demonstrations, seed, tmp_path)[1] >= 80
    assert train_car("", 0, tmp_path)[1] < 50
