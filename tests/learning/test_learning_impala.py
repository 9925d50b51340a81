"""CartPole and MinAtar's Breakout with workers that act while the host learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learning_tasks import BLIND_CARTPOLE, Task, run

IMPALA: dict[str, Any] = {"container": "impala", "impala.workers": 2, "compile": "off"}
PLAIN: dict[str, Any] = {"agent.normalize_observation": False, "agent.normalize_reward": False}
PPO: dict[str, Any] = PLAIN | {
    "agent.rollout": 32,
    "agent.minibatches": 1,
    "agent.epochs": 20,
    "agent.gamma": 0.98,
    "agent.gae_lambda": 0.8,
    "agent.learning_rate": 1e-3,
    "agent.learning_rate_schedule": "linear",
    "agent.clip_schedule": "linear",
}
VTRACE: dict[str, Any] = {
    "agent.rollout": 20,
    "agent.optimizer": "adam",
    "agent.optimizer_eps": 1e-5,
    "agent.learning_rate": 2e-3,
    "agent.learning_rate_schedule": "linear",
}
APEX: dict[str, Any] = {
    "agent.prioritized": True,
    "agent.epsilon_schedule": "constant",
    "agent.epsilon_start": 0.4,
    "agent.epsilon_ladder": 7.0,
}
SHARED = (
    Task("vtrace", "CartPole-v1", "vtrace", 475, 200_000, 3, IMPALA | VTRACE),
    Task("appo", "CartPole-v1", "appo", 475, 200_000, 3, IMPALA | PPO),
    Task("a3c", "CartPole-v1", "a3c", 475, 500_000, 3, IMPALA | VTRACE | {"agent.rollout": 16}),
    Task("apex", "CartPole-v1", "dqn", 475, 100_000, 3, IMPALA | APEX),
    Task("r2d2", BLIND_CARTPOLE, "r2d2", 475, 200_000, 3, IMPALA),
)
# the same with workers over Ray: what acts is up to one unroll older
OVER_RAY = tuple(
    replace(task, name=f"{task.name}_ray", settings={**task.settings, "impala.cluster": "auto"}, needs="ray")
    for task in SHARED
)
TASKS = {task.name: task for task in (*SHARED, *OVER_RAY)}

BREAKOUT: dict[str, Any] = {
    "env.num": 16,
    "agent.rollout": 20,
    "agent.optimizer": "adam",
    "agent.optimizer_eps": 1e-5,
    "agent.learning_rate": 1e-3,
    "agent.learning_rate_schedule": "linear",
    "network.net3d": "benchmarks.off_policy_minatar:SmallCNN",
    "network.shared": "yes",
    "compile": "off",
    "evaluation.greedy": False,
}


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TASKS)
def test_cartpole_is_learned_from_workers(name: str, seed: int, tmp_path: Path) -> None:
    if TASKS[name].needs:
        pytest.importorskip(TASKS[name].needs)
    outcome = run(TASKS[name], seed, tmp_path)
    print(outcome)
    assert outcome.passes(TASKS[name]), f"{outcome}, target {TASKS[name].target:g}"


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("container", ["local", "impala"])
def test_breakout_is_learned_from_workers_as_in_one_process(container: str, seed: int, tmp_path: Path) -> None:
    pytest.importorskip("minatar")
    settings = BREAKOUT | (IMPALA if container == "impala" else {})
    environment = "benchmarks.off_policy_minatar:Breakout"
    task = Task("breakout", environment, "vtrace", 2.2, 300_000, 2, settings, every=75_000)  # after 2,600 steps: 0.4
    outcome = run(task, seed, tmp_path)
    print(outcome)
    assert outcome.passes(task), f"{outcome}, target {task.target:g}"
