"""Offline agents learn more from recorded episodes than the policy that played them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning_tasks import TOY, UNWATCHED
from recorded_tasks import (
    DATA,
    TASKS,
    record,
    record_demonstrations,
    record_mixed,
    score,
    steps_to_target,
    train_expert,
)

import ludus
from ludus.core.dataset import RecordedEpisode
from ludus.data.npz import save_npz
from ludus.environments.toy import MaskedEnv, TargetEnv

QUICK: dict[str, Any] = UNWATCHED | {
    "network.hidden": (64, 64),
    "network.activation": "relu",
    "agent.gamma": 0.9,
    "agent.batch_size": 64,
    "agent.learning_rate": 2e-3,
}
LIGHT = {"agent.conservative_samples": 3, "agent.actor_learning_rate": 2e-3, "agent.conservative_coef": 1.0}
TOYS: dict[str, tuple[str, int, dict[str, Any]]] = {  # agent → toy, updates and settings
    "td3_bc": ("TargetEnv", 1_200, {}),
    "cql": ("TargetEnv", 800, LIGHT),
    "iql": ("TargetEnv", 1_000, {}),
    "discrete_cql": ("MaskedEnv", 600, {"agent.target_every": 50}),
    "discrete iql": ("MaskedEnv", 600, {}),
}
TARGETS = {"TargetEnv": -0.3, "MaskedEnv": 7.8}  # mean returns; those of the data: -13 and 2.7, imitated: -2.7 and 2.7


def random_episodes(toy: str) -> list[RecordedEpisode]:
    """Episodes of a policy that chooses among all allowed actions alike."""
    rng = np.random.default_rng(0)
    if toy == "MaskedEnv":
        masked = MaskedEnv()
        return record(masked, lambda seen: rng.choice(np.flatnonzero(seen["action_mask"])), 300)
    return record(TargetEnv(), lambda _: rng.uniform(-2, 2, 2).astype(np.float32), 400)


@pytest.mark.parametrize("name", TOYS)
def test_the_toy_is_learned_from_random_episodes(name: str, tmp_path: Path) -> None:
    toy, updates, settings = TOYS[name]
    path = str(tmp_path / "random.npz")
    save_npz(path, random_episodes(toy))
    given = QUICK | {"runs": str(tmp_path), "data.path": path} | settings
    result = ludus.train(TOY + toy, name.split()[-1], nb_step=updates, settings=given)
    assert result.evaluation is not None
    assert result.evaluation.mean >= TARGETS[toy], result.evaluation.mean


@pytest.mark.parametrize("agent", ["sac", "dqn"])
def test_demonstrations_replace_steps(agent: str, tmp_path: Path) -> None:
    """A toy is solved in a fraction of the steps that it takes without demonstrations of random actions."""
    toy = {"sac": "TargetEnv", "dqn": "MaskedEnv"}[agent]
    path = str(tmp_path / "random.npz")
    save_npz(path, random_episodes(toy))
    given = QUICK | {"runs": str(tmp_path), "agent.warmup": 64, "agent.updates_per_step": 2.0, "env.num": 4}
    returns = []
    for data in ({}, {"data.path": path, "data.share": 0.75}):
        result = ludus.train(TOY + toy, agent, nb_step=400, settings=given | data)
        assert result.evaluation is not None
        returns.append(result.evaluation.mean)
    assert returns[1] > returns[0]
    assert returns[1] > {"TargetEnv": -1.0, "MaskedEnv": 7.0}[toy]


SEEDS = range(3)
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
def test_demonstrations_take_sac_to_the_target_sooner(experts: dict[str, ludus.Player], tmp_path: Path) -> None:
    demonstrations = record_demonstrations(experts["pendulum"], 5, tmp_path)
    alone = [steps_to_target("", seed, tmp_path) for seed in SEEDS]
    helped = [steps_to_target(demonstrations, seed, tmp_path) for seed in SEEDS]
    assert np.mean(helped) < 0.8 * np.mean(alone), (helped, alone)
