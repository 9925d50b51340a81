"""Sampling from a replay buffer: ExperienceReplay against Stable-Baselines3's ReplayBuffer, interleaved in one process.

``python -m benchmarks.replay`` fills both with the same million steps, lets them draw batches of 256 in turn, and
prints a table of batches per second. It also measures writing one step of one environment.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec
from ludus.core.step import AgentStep, EnvStep
from ludus.experience.config import ReplayConfig
from ludus.experience.replay import ExperienceReplay

CAPACITY, BATCH, EPISODE = 1_000_000, 256, 200
JOBS = {"halfcheetah": (17, 6), "cartpole": (4, 1)}  # numbers in an observation; in an action (1: which of two)
TARGET = 2.0  # times SB3's batches per second


def filled(job: str, capacity: int, prioritized: bool = False) -> tuple[ExperienceReplay, ReplayBuffer, float]:
    """Return both buffers with the same steps, and the seconds per write of Ludus."""
    seen, said = JOBS[job]
    device, rng = torch.device("cpu"), np.random.default_rng(0)
    config = ReplayConfig(replay=capacity, batch_size=BATCH, prioritized=prioritized)
    ours = ExperienceReplay(config, 1, 0.99, {"observation": Spec((seen,), "float32")}, device)
    box, one = spaces.Box(-np.inf, np.inf, (seen,)), spaces.Box(-1, 1, (said,))
    theirs = ReplayBuffer(capacity, box, one if said > 1 else spaces.Discrete(2), device="cpu")
    drawn = torch.from_numpy(rng.standard_normal((1024, 1, seen), np.float32))
    actions = torch.from_numpy(rng.standard_normal((1024, 1, said), np.float32))
    actions = actions if said > 1 else (actions[..., 0] > 0).long()
    flags = torch.from_numpy(np.arange(EPISODE) == 0)[:, None]
    no, reward, state = torch.zeros(1, dtype=torch.bool), torch.ones(1), HiddenState()
    seconds = 0.0
    for start in range(0, capacity, 1024):
        numbers = range(start, min(start + 1024, capacity))
        steps = [
            EnvStep({"observation": drawn[i % 1024]}, reward, no, no, flags[i % EPISODE], ~flags[i % EPISODE])
            for i in numbers
        ]
        said_steps = [AgentStep({"action": actions[i % 1024]}, {}, state) for i in numbers]
        began = time.thread_time()
        for step, acted in zip(steps, said_steps, strict=True):
            ours.env_write(step, state)
            ours.agent_write(acted)
        seconds += time.thread_time() - began
    rows = np.arange(capacity) % 1024
    theirs.observations[:] = drawn.numpy()[rows]
    theirs.next_observations[:-1], theirs.actions[:] = (
        theirs.observations[1:],
        actions.numpy()[rows].reshape(-1, 1, said),
    )
    theirs.rewards[:], theirs.dones[:], theirs.timeouts[:] = 1, 0, 0
    theirs.full = True
    return ours, theirs, seconds / capacity


def rate(call: Callable[[], Any], number: int) -> float:
    """Return calls per second of this thread's CPU time, which depends little on other processes."""
    began = time.thread_time()
    for _ in range(number):
        call()
    return number / (time.thread_time() - began)


def play(job: str, capacity: int, rounds: int, number: int) -> str:
    """Return a row of the table."""
    ours, theirs, write = filled(job, capacity)
    sides: dict[str, Callable[[], Any]] = {"ours": ours.read, "theirs": lambda: theirs.sample(BATCH)}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        order = list(sides) if round_ % 2 == 0 else list(sides)[::-1]  # alternating order
        for name in order:
            measured = rate(sides[name], number)
            rates[name] += [measured] if round_ else []  # the first round warms up
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    low = statistics.quantiles(ratios, n=4)[0]
    medians = [statistics.median(x) for x in rates.values()]
    verdict = "yes" if low >= TARGET else "no"
    return (
        f"| {job} | {medians[0]:,.0f} | {medians[1]:,.0f} | {statistics.median(ratios):.2f} | {low:.2f} | {TARGET} | "
        f"{verdict} | {write * 1e6:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Uniform draws from a replay, against Stable-Baselines3.")
    parser.add_argument("--capacity", type=int, default=CAPACITY)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--number", type=int, default=1_000, help="batches per round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"capacity {args.capacity:,}, batch {BATCH}, one thread, {args.rounds} rounds of {args.number} batches\n")
    print("| job | ludus, batches/s | SB3 | ratio | lower quartile | target | met | µs to write a step |")
    print("|---|---|---|---|---|---|---|---|")
    for job in JOBS:
        print(play(job, args.capacity, args.rounds, args.number), flush=True)


if __name__ == "__main__":
    main()
