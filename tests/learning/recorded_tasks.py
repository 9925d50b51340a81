"""Recorded episodes of mixed quality and what agents make of them, for slow tests and ``benchmarks/offline.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import ludus
from ludus.core.dataset import RecordedEpisode
from ludus.data.npz import save_npz

PROTOCOL: dict[str, Any] = {
    "quiet": True,
    "threads": 1,
    "compile": "off",
    "checkpoint_every": 0,
    "log_every": 0,
    "evaluation.every": 0,
    "evaluation.episodes": 100,
    "evaluation.environments": 100,
}


@dataclass(frozen=True)
class Data:
    """Half of the steps are those of a trained agent, the others those of a worse policy."""

    environment: str
    expert: str  # the trained agent
    nb_step: int  # of its training
    steps: int  # of each half
    worse: Callable[[Any, np.random.Generator], Any]  # (the expert's action, random numbers) → another action


@dataclass(frozen=True)
class Offline:
    """An agent, by the preset of the environment, and the data that it learns from."""

    data: str
    agent: str
    updates: int


DATA = {
    # random torques
    "pendulum": Data("Pendulum-v1", "sac", 10_000, 4_000, lambda _, rng: rng.uniform(-2, 2, 1).astype(np.float32)),
    # does the opposite in three of four steps; random choices would leave the expert's the most frequent one in every
    # state, so that imitation would be perfect
    "cartpole": Data("CartPole-v1", "ppo", 40_000, 4_000, lambda a, rng: a if rng.random() < 0.25 else 1 - a),
}
TASKS = {
    "pendulum/bc": Offline("pendulum", "bc", 2_000),
    "pendulum/td3_bc": Offline("pendulum", "td3_bc", 6_000),
    "pendulum/cql": Offline("pendulum", "cql", 5_000),
    "pendulum/iql": Offline("pendulum", "iql", 5_000),
    "cartpole/bc": Offline("cartpole", "bc", 2_000),
    "cartpole/discrete_cql": Offline("cartpole", "discrete_cql", 4_000),
    "cartpole/iql": Offline("cartpole", "iql", 4_000),
}


def train_expert(name: str, folder: Path) -> ludus.Player:
    """Train the expert by the preset of its environment; the last policy may be a bad one, so return the best."""
    data = DATA[name]
    settings = PROTOCOL | {"runs": str(folder / "expert"), "evaluation.every": data.nb_step // 8}
    return ludus.train(data.environment, data.expert, nb_step=data.nb_step, seed=0, settings=settings).load("best")


def record_mixed(name: str, expert: ludus.Player, folder: Path) -> str:
    """Record both halves; return the file."""
    data, rng = DATA[name], np.random.default_rng(0)
    environment = gymnasium.make(data.environment)
    episodes: list[RecordedEpisode] = []
    for play in (expert.act, lambda seen: data.worse(expert.act(seen), rng)):
        steps, seed = 0, 1_000 * len(episodes)
        while steps < data.steps:
            episodes += record(environment, play, seed=seed + steps)
            steps += episodes[-1].length
    path = str(folder / f"{name}.npz")
    save_npz(path, episodes)
    return path


def record(
    environment: gymnasium.Env[Any, Any], act: Callable[[Any], Any], episodes: int = 1, seed: int = 0
) -> list[RecordedEpisode]:
    """Play episodes by ``act(observation)``; observations and actions are plain or flat Dicts."""
    return [_play(environment, act, seed + number) for number in range(episodes)]


def _play(environment: gymnasium.Env[Any, Any], act: Callable[[Any], Any], seed: int) -> RecordedEpisode:
    observation, _ = environment.reset(seed=seed)
    seen, done, rewards, terminated, truncated = [observation], [], [], False, False
    while not (terminated or truncated):
        done.append(act(observation))
        observation, reward, terminated, truncated, _ = environment.step(done[-1])
        seen.append(observation)
        rewards.append(reward)
    ends = bool(terminated), bool(truncated)
    return RecordedEpisode(_stack(seen, "observation"), _stack(done, "action"), np.asarray(rewards, np.float32), *ends)


def _stack(values: list[Any], name: str) -> dict[str, NDArray[Any]]:
    if isinstance(values[0], Mapping):
        return {key: np.stack([np.asarray(value[key]) for value in values]) for key in values[0]}
    return {name: np.stack([np.asarray(value) for value in values])}


def score(task: Offline, path: str, seed: int, folder: Path) -> float:
    """Train on the data; return the mean return of 100 greedy episodes."""
    settings = PROTOCOL | {"runs": str(folder), "data.path": path}
    environment = DATA[task.data].environment
    result = ludus.train(environment, task.agent, nb_step=task.updates, seed=seed, settings=settings)
    assert result.evaluation is not None
    return result.evaluation.mean


CAR = "MountainCarContinuous-v0"  # rewards the goal alone, and actions cost: SAC learns to stand still without help
CAR_SETTINGS: dict[str, Any] = {
    "network.hidden": (64, 64),
    "agent.learning_rate": 1e-3,
    "agent.batch_size": 128,
    "agent.updates_per_step": 0.5,
    "agent.warmup": 500,
    "env.num": 1,
    "evaluation.every": 1_000,
    "evaluation.episodes": 10,
    "evaluation.environments": 10,
    "evaluation.stop_at": 80.0,
}


def record_demonstrations(path: Path, episodes: int = 5) -> str:
    """Record a car that is always pushed the way it moves, with returns of 89; return the file."""
    act = lambda seen: np.array([1.0 if seen[1] >= 0 else -1.0], np.float32)  # noqa: E731
    save_npz(path, record(gymnasium.make(CAR), act, episodes))
    return str(path)


def train_car(demonstrations: str, seed: int, folder: Path) -> tuple[int, float]:
    """Train SAC, with demonstrations if a file is named; return its steps, until it reaches 80, and the last return."""
    settings = PROTOCOL | CAR_SETTINGS | {"runs": str(folder), "data.path": demonstrations}
    result = ludus.train(CAR, "sac", nb_step=10_000, seed=seed, settings=settings)
    assert result.evaluation is not None
    return result.steps, result.evaluation.mean
