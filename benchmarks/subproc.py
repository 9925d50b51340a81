"""Environments in processes: SubProcEnvManager against Gymnasium's AsyncVectorEnv and SB3's SubprocVecEnv.

``python -m benchmarks.subproc`` runs all jobs in interleaved rounds, each in a new process, and prints the
tables; ``python -m benchmarks.subproc cartpole --side ludus`` runs one round and prints one line of JSON. All sides
get the same random actions, drawn beforehand. Steps are those of single environments.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from benchmarks.protocol import emit
from benchmarks.report import quartiles, ratios

NUM, DRAWN = 8, 2048  # environments; steps with random actions, which are repeated
WORK = 200e-6  # seconds of CPU time that a step of the second job takes
IDS = {"cartpole": "CartPole-v1", "frames": "benchmarks.subproc:Frames"}
PEERS = ("gymnasium", "sb3")
TARGETS = {  # (job, other side): how many times faster the lower quartile must be
    ("cartpole", "gymnasium"): 5.0,
    ("cartpole", "sb3"): 5.0,
    ("frames", "gymnasium"): 1.5,
    ("frames", "sb3"): 1.5,
    ("frames", "loop"): 2 * 0.75,
}
WAYS = [["--workers", str(workers), *alternate] for workers in (1, 2) for alternate in ([], ["--alternate"])]
Advance = Callable[[int], Any]


class Frames(gymnasium.Env[Any, Any]):
    """Works for 200 µs of CPU time per step and returns four frames of 84×84 bytes."""

    def __init__(self, length: int = 1000) -> None:
        self.observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = spaces.Discrete(6)
        self._length, self._step = length, 0
        self._shown = np.random.default_rng(0).integers(0, 256, (16, 84, 84, 4), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._step = 0
        return self._shown[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Work, then return the next frames."""
        until = time.thread_time() + WORK
        while time.thread_time() < until:
            pass
        self._step += 1
        return self._shown[self._step % 16], 1.0, False, self._step >= self._length, {}


def make(job: str) -> Any:
    if job == "frames":
        return Frames()
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


def ludus(job: str, actions: Any, args: argparse.Namespace) -> tuple[Advance, Callable[[], None]]:
    import torch

    from ludus.environments.config import EnvConfig
    from ludus.managers.subproc import SubProcEnvManager

    config = EnvConfig(IDS[job], NUM, "subproc", workers=args.workers, alternate=args.alternate)
    manager = SubProcEnvManager(config, NUM)
    drawn = torch.from_numpy(actions)
    parts = [[{"action": x[rows]} for x in drawn] for rows in manager.groups]
    manager.reset(0)
    if not args.alternate:
        return lambda t: manager.step(parts[0][t]), manager.close

    def alternate(t: int) -> None:
        """Step two groups in turn."""
        for group in (0, 1):
            manager.recv(group)
            manager.send(parts[group][t], group)

    for group in (0, 1):
        manager.send(parts[group][0], group)
    return alternate, manager.close


def async_vector(job: str, actions: Any, args: argparse.Namespace) -> tuple[Advance, Callable[[], None]]:
    env = gymnasium.vector.AsyncVectorEnv([lambda: make(job)] * NUM, shared_memory=True, copy=False)
    env.reset(seed=0)
    return lambda t: env.step(actions[t]), env.close


def sb3(job: str, actions: Any, args: argparse.Namespace) -> tuple[Advance, Callable[[], None]]:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([lambda: make(job)] * NUM)
    env.seed(0)
    env.reset()
    return lambda t: env.step(actions[t]), env.close


def loop(job: str, actions: Any, args: argparse.Namespace) -> tuple[Advance, Callable[[], None]]:
    """Step all environments one after the other in this process, without a library."""
    envs = [make(job) for _ in range(NUM)]
    shown = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])

    def advance(t: int) -> None:
        for i, (env, action) in enumerate(zip(envs, actions[t], strict=True)):
            shown[i], _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                shown[i], _ = env.reset()

    return advance, lambda: None


SIDES = {"ludus": ludus, "gymnasium": async_vector, "sb3": sb3, "loop": loop}


def play(args: argparse.Namespace) -> None:
    """Run one round: warm up, then measure."""
    choices = 2 if args.job == "cartpole" else 6
    actions = np.random.default_rng(args.seed).integers(0, choices, (DRAWN, NUM))
    advance, close = SIDES[args.side](args.job, actions, args)
    steps, began, warm = 0, time.perf_counter(), args.seconds / 5
    while (now := time.perf_counter()) < began + warm:
        for t in range(16):
            advance(t)
    began = now
    while (now := time.perf_counter()) < began + args.seconds:
        for t in range(64):
            advance((steps + t) % DRAWN)
        steps += 64
    close()
    emit(side=args.side, job=args.job, rate=steps * NUM / (now - began))


def contest(job: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Choose Ludus' best variant, then run the rounds."""
    from benchmarks.harness import call

    timed = ["--seconds", str(seconds)]
    tried = [(call("benchmarks.subproc", job, "--side", "ludus", *way, *timed)["rate"], way) for way in WAYS]
    best = max(tried)[1]
    sides = ["ludus", *PEERS, *(["loop"] if job == "frames" else [])]
    played: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for round_ in range(rounds):
        for side in sides if round_ % 2 == 0 else sides[::-1]:
            way = best if side == "ludus" else []
            more = [*timed, "--seed", str(round_)]
            played[side].append(call("benchmarks.subproc", job, "--side", side, *way, *more))
    return {"rounds": played, "options": {"ludus": best}}


def table(job: str, result: dict[str, Any]) -> str:
    """Return a table with ratios to each other side; a target is met if the lower quartile of the ratio reaches it."""
    rounds, lines = result["rounds"], []
    for side, played in rounds.items():
        low, middle, high = quartiles([r["rate"] for r in played])
        told = f"| {side} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) |"
        if side == "ludus":
            lines.append(f"{told} | | | {len(played)} |")
            continue
        r_low, r_middle, r_high = quartiles(ratios(rounds["ludus"], played))
        target = TARGETS[job, side]
        met = "yes" if r_low >= target else "no"
        lines.append(f"{told} **{r_middle:.2f}** ({r_low:.2f} to {r_high:.2f}) | {target} | {met} | {len(played)} |")
    head = f"| {job}, ludus {' '.join(result['options']['ludus'])} | steps/s, median (quartiles) | ludus is faster by |"
    return "\n".join([f"{head} target | met | rounds |", "|---|---|---|---|---|---|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description="Environments in worker processes.")
    parser.add_argument("job", nargs="?", choices=list(IDS), help="none: all")
    parser.add_argument("--side", choices=list(SIDES), help="run one round of one side")
    parser.add_argument("--workers", type=int, default=2, help="processes of ludus")
    parser.add_argument("--alternate", action="store_true", help="two groups of ludus in flight")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each round is measured")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.side:
        play(args)
        return
    from benchmarks.harness import BUSY, machine, save

    taken_on, tables = machine(), []
    for job in [args.job] if args.job else list(IDS):
        result = contest(job, args.rounds, args.seconds)
        tables.append(table(job, result))
        save(f"subproc-{job}", json.loads(json.dumps(result)), taken_on)
    print("\n" + "\n\n".join(tables))
    if taken_on["load"] > BUSY:
        print(f"\nThe load was {taken_on['load']:.1f} at the start: do not publish these results.")


if __name__ == "__main__":
    main()
