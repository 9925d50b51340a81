"""Compare PPO with Stable-Baselines3 in interleaved rounds, each library with its best thread count: ``make bench``.

Results are written to ``benchmarks/out/`` as JSON and printed as tables for ``docs/benchmarks.md``. To run one job:
``python -m benchmarks.harness cartpole``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import growth
from benchmarks.limit import ACTIONS, measure_limit
from benchmarks.protocol import OUT, THREADS
from benchmarks.report import comparison_table, limit_table, start_table

Result = dict[str, Any]
BUSY = 0.5  # with a higher load at the start, results should not be published
TARGETS = {  # (job, side, peer): the median ratio to the peer to reach; solve: the share of its time to stay below
    ("cartpole", "ludus", "sb3"): 3.3,
    ("cartpole", "ludus uncompiled", "sb3"): 2.3,
    ("pong", "ludus", "sb3"): 1.4,
    ("recurrent", "ludus", "sb3"): 4.0,
    ("recurrent", "ludus", "skrl"): 1.4,
    ("solve", "ludus", "sb3"): 0.75,
}


@dataclass(frozen=True)
class Side:
    """One library in a comparison: the module to run and its options."""

    name: str
    module: str
    options: tuple[str, ...] = ()

    def run(self, job: str, *more: str) -> Result:
        """Run one round in a new process."""
        return call(self.module, job, *self.options, *more, "--started", str(time.time()))


SB3 = (Side("sb3", "benchmarks.peers"), Side("sb3", "benchmarks.peers", ("--backend", "dummy")))
SKRL = (Side("skrl", "benchmarks.peers_skrl"),)
LUDUS = Side("ludus", "benchmarks.ours")
UNCOMPILED = Side("ludus uncompiled", "benchmarks.ours", ("--compile", "off"))
CONTESTS: dict[str, tuple[tuple[Side, ...], ...]] = {  # for each side its variants, of which the fastest is used
    "cartpole": ((LUDUS,), (UNCOMPILED,), SB3),
    "pong": ((LUDUS,), SB3[:1]),
    "recurrent": ((LUDUS,), SB3, SKRL),
    "solve": ((LUDUS,), SB3),
}


def call(module: str, *arguments: str, python: str = sys.executable) -> Result:
    """Run a module and return the JSON of its last line."""
    done = subprocess.run([python, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    result: Result = json.loads(done.stdout.splitlines()[-1])
    print(" ", json.dumps(result), flush=True)
    return result


def speed(result: Result) -> float:
    """Return steps per second."""
    return float(result.get("rate") or result["step"] / result["seconds"])


def pick(ways: tuple[Side, ...], job: str, options: list[str]) -> Side:
    """Return the fastest variant and thread count of a side, by the median of three rounds in turn."""
    sides = [
        Side(way.name, way.module, (*way.options, "--threads", str(threads))) for way in ways for threads in THREADS
    ]
    tried = [[speed(side.run(job, *options)) for side in sides] for _ in range(3)]
    medians = [statistics.median(found) for found in zip(*tried, strict=True)]
    return sides[medians.index(max(medians))]


def take_turns(sides: list[Side], rounds: int, job: str, timed: list[str]) -> dict[str, list[Result]]:
    """Run rounds of the sides in turn, in alternating order."""
    played: dict[str, list[Result]] = {side.name: [] for side in sides}
    for round_ in range(rounds):
        for side in sides if round_ % 2 == 0 else sides[::-1]:
            played[side.name].append(side.run(job, *timed, "--seed", str(round_)))
    return played


def contest(job: str, rounds: int, seconds: float) -> Result:
    """Pick the best variant of each side, then run the rounds."""
    seconds = max(seconds, 20.0) if job == "pong" else seconds  # one update of Pong takes seconds
    timed = [] if job == "solve" else ["--seconds", str(seconds), "--warm-up", str(warm_up(job))]
    sides = [pick(ways, job, timed) for ways in CONTESTS[job]]
    print(f"{job}: " + "; ".join(f"{side.name} {' '.join(side.options)}" for side in sides))
    played = take_turns(sides, rounds, job, timed)
    return {
        "rounds": played,
        "options": {side.name: list(side.options) for side in sides},
        "targets": {f"{name}/{peer}": target for (of, name, peer), target in TARGETS.items() if of == job},
    }


def warm_up(job: str) -> float:
    """Return the seconds before measuring; the update in which they end, with any compilation, is not measured."""
    return 10.0 if job == "pong" else 5.0


def start_up(rounds: int) -> Result:
    """Measure import times and the time from process start to the first update."""
    imports = {"torch": "import torch", "ludus": "import torch, ludus; ludus.train, ludus.load"}
    times: dict[str, list[float]] = {f"import {name}": [] for name in imports}
    times |= {"first update, ludus": [], "first update, sb3": []}
    for _ in range(rounds):
        for name, code in imports.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times[f"import {name}"].append(time.perf_counter() - start)
        for side in (LUDUS, SB3[0]):
            times[f"first update, {side.name}"].append(side.run("solve", "--first-update")["seconds"])
    return {"medians": {name: statistics.median(x) for name, x in times.items()}, "times": times}


def processor() -> str:
    """Return the processor's name if the system provides it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> Result:
    """Describe the machine, the versions and the load."""
    names = ("torch", "gymnasium", "stable-baselines3", "sb3-contrib", "skrl", "envpool", "numpy")
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "time": time.strftime("%Y-%m-%d %H:%M"),
        "load": os.getloadavg()[0],
    }


def save(job: str, result: Result, taken_on: Result) -> None:
    OUT.mkdir(exist_ok=True)
    command = f"python -m benchmarks.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}".strip()
    (OUT / f"{job}.json").write_text(json.dumps({"command": command, "machine": taken_on} | result, indent=1) + "\n")


def main() -> None:
    everything = [*CONTESTS, "growth", "start"]
    parser = argparse.ArgumentParser(description="Ludus against Stable-Baselines3 and skrl.")
    parser.add_argument("jobs", nargs="*", help=f"any of {', '.join(everything)}; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each round is measured")
    args = parser.parse_args()
    if unknown := set(args.jobs) - set(everything):
        parser.error(f"no such job: {', '.join(sorted(unknown))}; there are {', '.join(everything)}")
    taken_on = machine()  # before this process adds load
    tables: list[str] = []
    for job in args.jobs or everything:
        if job == "start":
            result = start_up(args.rounds)
            tables.append(start_table(result))
        elif job == "growth":
            result = growth.measure(call, min(args.rounds, 3), args.seconds)
            tables.append(growth.table(result))
        else:
            result = contest(job, max(args.rounds, 10) if job == "solve" else args.rounds, args.seconds)
            peers = [side for side in ("sb3", "skrl") if side in result["rounds"]]
            tables += [comparison_table(job, result, peer) for peer in peers]
            if job in ACTIONS:
                result |= measure_limit(call, job)
                tables.append(limit_table(result))
        save(job, result, taken_on)
    print("\n" + "\n\n".join(tables))
    if taken_on["load"] > BUSY:
        print(f"\nThe load was {taken_on['load']:.1f} at the start: do not publish these results.")


if __name__ == "__main__":
    main()
