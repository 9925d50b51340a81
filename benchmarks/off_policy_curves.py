"""Compare learning curves: ``python -m benchmarks.off_policy curves --job sac --steps 30000 --seeds 3``.

Stable-Baselines3 and Ludus train with the same settings and are evaluated every few thousand steps: ten fresh greedy
episodes, or fifty of MinAtar's short ones. Two runs at a time, in processes of their own with one thread each. What is
finished is kept in ``out/off_policy_curves.jsonl`` and not run again: for Ludus per commit, for Stable-Baselines3 per
version of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.learning import commit
from benchmarks.off_policy_jobs import CURVES, OffPolicySettings
from benchmarks.protocol import OUT, emit

KEPT = OUT / "off_policy_curves.jsonl"
SIDES = ("sb3", "ludus")
EPISODES = {"sac": 10, "td3": 10, "pong": 50}  # per evaluation
EVALUATIONS, AT_ONCE = 6, 2
PONG_STEPS, LEAST = 100_000, 3_000
ENOUGH = 0.75  # of the mean of Stable-Baselines3
Row = dict[str, Any]


class Run(NamedTuple):
    """One seed of one side, with the current code and settings."""

    job: str
    side: str
    seed: int
    steps: int
    code: str  # a commit, or a version of Stable-Baselines3
    settings: str

    @classmethod
    def of(cls, row: Row) -> Run:
        """Return the run of a stored result."""
        return cls(*(row[name] for name in cls._fields))


def runs_of(job: str, sides: list[str], seeds: int, steps: int) -> list[Run]:
    """Return every seed of the sides; seeds of different sides do not correspond."""
    protocol = {"every": steps // EVALUATIONS, "episodes": EPISODES[job]}
    told = json.dumps(asdict(settings_of(job, steps)) | protocol, sort_keys=True)
    print_ = hashlib.sha256(told.encode()).hexdigest()[:10]
    codes = {"sb3": f"sb3 {version('stable-baselines3')}", "ludus": commit()}
    return [Run(job, side, seed, steps, codes[side], print_) for seed in range(seeds) for side in sides]


def settings_of(job: str, steps: int) -> OffPolicySettings:
    """Return the job's settings for a run of a fixed number of steps."""
    settings = CURVES[job]
    return replace(settings, steps=steps, explore=min(settings.explore, steps))


def kept() -> dict[Run, Row]:
    """Return the newest stored result of each run."""
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    return {Run.of(row): row for row in map(json.loads, lines)}


def greedy(model: Any, settings: OffPolicySettings, seed: int, episodes: int) -> float:
    """Return the mean return of greedy episodes of a Stable-Baselines3 model."""
    from benchmarks.off_policy_peers import sb3_environment

    env, returns = sb3_environment(settings, "simple", seed), []
    observation = env.reset()
    while len(returns) < episodes:
        observation, _, _, infos = env.step(model.predict(observation, deterministic=True)[0])
        returns += [infos[0]["episode"]["r"]] if "episode" in infos[0] else []
    env.close()
    return float(statistics.fmean(returns))


def sb3(settings: OffPolicySettings, seed: int, every: int, episodes: int) -> list[Any]:
    """Return steps and mean returns of Stable-Baselines3."""
    from benchmarks.off_policy_peers import sb3_curve

    return sb3_curve(settings, seed, every, lambda model, n: greedy(model, settings, 1_000 + 100 * seed + n, episodes))


def ludus(settings: OffPolicySettings, seed: int, every: int, episodes: int) -> list[Any]:
    """Return steps and mean returns of Ludus."""
    import ludus
    from benchmarks.off_policy import ludus_settings
    from tests.learning.learning_tasks import evaluations

    with tempfile.TemporaryDirectory(prefix="ludus-") as runs:
        protocol = {"runs": runs, "threads": 1, "evaluation.every": every, "evaluation.episodes": episodes}
        protocol["evaluation.environments"] = episodes
        chosen = ludus_settings(settings) | protocol
        result = ludus.train(
            settings.environment, settings.agent, nb_step=settings.steps, seed=seed, preset="none", settings=chosen
        )
        return evaluations(result.run)


def play(run: Run) -> None:
    """Train in this process and print the curve as one line of JSON."""
    import torch

    torch.set_num_threads(1)
    began = time.perf_counter()
    protocol = run.seed, run.steps // EVALUATIONS, EPISODES[run.job]
    curve = {"sb3": sb3, "ludus": ludus}[run.side](settings_of(run.job, run.steps), *protocol)
    emit(curve=curve, seconds=time.perf_counter() - began)


def play_apart(run: Run) -> Row:
    """Train in a new process."""
    command = [sys.executable, "-m", "benchmarks.off_policy", "curves", "--one", json.dumps(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{run.job}, {run.side}, seed {run.seed} ended with {done.returncode}:\n{done.stderr}")
    outcome: Row = json.loads(done.stdout.splitlines()[-1])
    return run._asdict() | outcome


def play_all(runs: list[Run]) -> None:
    """Run what is missing, and store each result."""
    have = kept()
    missing = [run for run in runs if run not in have]
    print(f"{len(runs)} runs, {len(runs) - len(missing)} of them already done.", flush=True)
    KEPT.parent.mkdir(exist_ok=True)
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for done, future in enumerate(as_completed([pool.submit(play_apart, run) for run in missing]), 1):
            row = future.result()
            with KEPT.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            told = " ".join(f"{mean:.4g}" for _, mean in row["curve"])
            print(
                f"[{done}/{len(missing)}] {row['side']} seed {row['seed']}: {told}, {row['seconds']:.0f} s", flush=True
            )
    finally:
        pool.shutdown(cancel_futures=True)  # a run that broke or Ctrl-C: what has not begun is for the next call


def table(job: str, rows: list[Row]) -> str:
    """Return a table with one row per side: the mean of the last evaluation over seeds, and the mean curve."""
    of = {side: [row for row in rows if row["side"] == side] for side in SIDES}
    steps = [step for step, _ in rows[0]["curve"]]
    lines = [
        f"| {job}, {steps[-1]:,} steps | last evaluation: mean ± standard error | seed by seed | mean at "
        f"{', '.join(f'{step:,}' for step in steps[:-1])} | code |",
        "|---|---|---|---|---|",
    ]
    for side, played in ((side, played) for side, played in of.items() if played):
        last = [row["curve"][-1][1] for row in played]
        error = statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else 0.0
        before = [
            statistics.fmean(means)
            for means in zip(*([m for _, m in row["curve"][:-1]] for row in played), strict=True)
        ]
        lines.append(
            f"| {side} | **{statistics.fmean(last):.4g}** ± {error:.3g} | {', '.join(f'{x:.4g}' for x in last)} | "
            f"{', '.join(f'{x:.4g}' for x in before)} | {played[0]['code']} |"
        )
    return "\n".join([*lines, *_verdict(of)])


def _verdict(of: dict[str, list[Row]]) -> list[str]:
    if not of["sb3"] or not of["ludus"]:
        return []
    theirs, ours = (statistics.fmean(row["curve"][-1][1] for row in of[side]) for side in ("sb3", "ludus"))
    met = ours >= theirs - (1 - ENOUGH) * abs(theirs)
    share = f", {ours / theirs:.2f} of theirs" if theirs > 0 else ""
    return ["", f"Ludus {'is' if met else 'is **not**'} within 25% of Stable-Baselines3 or above{share}."]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.off_policy curves", description="Off-policy agents: learning.")
    parser.add_argument("--job", choices=list(CURVES), default="sac", help="pong: MinAtar's Breakout in its place")
    parser.add_argument("--steps", type=int, default=0, help=f"0: 30,000, or of pong {PONG_STEPS:,}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one:
        play(Run(*json.loads(args.one)))
        return
    steps = args.steps or (PONG_STEPS if args.job == "pong" else 30_000)
    if steps < LEAST:
        parser.error(f"--steps is {steps}, too few for {EVALUATIONS} evaluations and a warm-up; give {LEAST} or more")
    runs = runs_of(args.job, args.sides, args.seeds, steps)
    play_all(runs)
    have = kept()
    print("\n" + table(args.job, [have[run] for run in runs]))
