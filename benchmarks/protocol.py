"""Shared by both libraries: jobs and their settings, timing, and the line of JSON that a round prints.

Only the standard library is imported, so that start-up times are not affected.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "out"
THREADS = (1, 2)  # numbers of torch threads to choose from


@dataclass(frozen=True)
class PPOSettings:
    """The settings of one job, independent of the library."""

    environments: int = 8
    rollout: int = 128
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 2.5e-4
    linear: bool = False  # learning rate and clip fall linearly to 0 over ``steps``
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    max_grad_norm: float = 0.5
    lstm: int = 0  # units of an LSTM between the observation and the 64-64 layers; 0: no LSTM
    steps: int = 100_000_000  # for a timed job: more than it can reach


JOBS: dict[str, PPOSettings] = {
    "cartpole": PPOSettings(),
    "pong": PPOSettings(clip=0.1),
    "recurrent": PPOSettings(lstm=64),
    "solve": PPOSettings(  # CartPole-v1 in RL Baselines3 Zoo
        rollout=32,
        epochs=20,
        minibatches=1,
        learning_rate=1e-3,
        linear=True,
        gamma=0.98,
        gae_lambda=0.8,
        entropy=0.0,
        steps=100_000,
    ),
}
SOLVED, EVALUATION_EPISODES, EVALUATION_EVERY = 475.0, 100, 5_000


class Meter:
    """Measures environment steps per second over whole updates, starting with the first after the warm-up.

    The warm-up begins now, or with the first update.
    """

    def __init__(self, warm_up: float, seconds: float, at_first_update: bool = False) -> None:
        self.warm_up, self.seconds = warm_up, seconds
        self._began = None if at_first_update else time.perf_counter()
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def update(self, step: int) -> bool:
        """Record that ``step`` environment steps are done; return whether to stop."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        if self._first is None:
            if now - self._began >= self.warm_up:
                self._first = (step, now)
            return False
        self._last = (step, now)
        return now - self._first[1] >= self.seconds

    @property
    def rate(self) -> float:
        """Environment steps per second."""
        if self._first is None or self._last is None:
            raise RuntimeError("The run ended before the warm-up did; give more steps or less warm-up.")
        return (self._last[0] - self._first[0]) / (self._last[1] - self._first[1])


def arguments(description: str) -> argparse.ArgumentParser:
    """Return the parser of a round, the same for both libraries."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("job", choices=list(JOBS))
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before measuring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-update", action="store_true", help="only measure the time to the first update")
    parser.add_argument("--started", type=float, default=time.time(), help="when the process was started (time.time())")
    return parser


def emit(**result: Any) -> None:
    """Print the result of a round as one line of JSON."""
    print(json.dumps(result), flush=True)
    sys.stdout.flush()


def evaluate_cartpole(act: Callable[[Any], Any], seed: int) -> float:
    """Return the mean return of one episode per environment, all in parallel."""
    import gymnasium
    import numpy as np

    env = gymnasium.make_vec("CartPole-v1", num_envs=EVALUATION_EPISODES, vectorization_mode="vector_entry_point")
    observation, _ = env.reset(seed=seed)
    running = np.ones(EVALUATION_EPISODES, bool)
    returns = np.zeros(EVALUATION_EPISODES)
    while running.any():
        observation, reward, terminated, truncated, _ = env.step(act(observation))
        returns += reward * running
        running &= ~(terminated | truncated)
    env.close()
    return float(returns.mean())
