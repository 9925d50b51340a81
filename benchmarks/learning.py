"""Run all learning tasks: ``python -m benchmarks.learning [--task NAME …] [--write]``.

Two runs at a time, in separate processes with one thread each. Results are stored in ``out/learning.jsonl``
and not run again for the same commit and settings, so the command can be stopped and given again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.protocol import OUT
from ludus.settings.settings import resolve_settings, to_flat
from tests.learning.learning_tasks import (
    CLASSIC,
    IMAGES,
    OFF_POLICY,
    OFF_POLICY_TOYS,
    TASKS,
    TOYS,
    Outcome,
    Task,
    run,
    settings_of,
)

ROOT = Path(__file__).parents[1]
KEPT, PAGE = OUT / "learning.jsonl", ROOT / "docs" / "results.md"
AT_ONCE = 2
ANY = "any"
Row = dict[str, Any]


class Job(NamedTuple):
    """One seed of one task, with the current code and settings."""

    task: str
    seed: int
    commit: str
    settings: str

    @classmethod
    def of(cls, row: Row) -> Job:
        """Return the job of a stored result."""
        return cls(*(row[name] for name in cls._fields))


def commit() -> str:
    """Return the last commit that changed the library, with a + if it has uncommitted changes."""
    head = _git("log", "-1", "--format=%h", "--abbrev=10", "--", "ludus")
    return head + "+" * bool(_git("status", "--porcelain", "--", "ludus"))


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def fingerprint(task: Task) -> str:
    """Return a hash of all settings of the task, including those of its preset."""
    overrides = settings_of(task, Path("runs")) | {"nb_step": task.nb_step}
    settings = resolve_settings(task.environment, task.agent, overrides=overrides).settings
    named = to_flat(settings) | {"target": task.target}
    if named["network.body"] == "auto":  # with one observation, as in all of these tasks
        named["network.body"] = "identity1d"
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:10]


def kept(at: str) -> dict[Job, Row]:
    """Return the newest stored result of each job; with ANY, of any commit."""
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    rows = {Job.of(row): row for row in map(json.loads, lines)}
    return {job._replace(commit=ANY): row for job, row in rows.items()} if at == ANY else rows


def jobs_of(tasks: Iterable[Task], at: str) -> list[Job]:
    """Return every seed of the tasks, with the current settings."""
    return [Job(task.name, seed, at, fingerprint(task)) for task in tasks for seed in range(task.seeds)]


def run_apart(job: Job) -> Row:
    """Run a job in a new process."""
    command = [sys.executable, "-m", "benchmarks.learning", "--one", job.task, str(job.seed)]
    environment, here = os.environ | {"OMP_NUM_THREADS": "1"}, commit()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{job.task}, seed {job.seed} failed:\n{done.stderr}")
    outcome: Row = json.loads(done.stdout.splitlines()[-1])
    return job._replace(commit=here)._asdict() | outcome


def run_one(name: str, seed: int) -> None:
    """Run a job in this process and print its outcome as one line of JSON."""
    with tempfile.TemporaryDirectory(prefix="ludus-") as runs:
        print(json.dumps(run(TASKS[name], seed, Path(runs))._asdict()))


def run_all(jobs: list[Job], have: dict[Job, Row]) -> None:
    """Run jobs without a result in ``have``, and store each result."""
    missing = sorted((job for job in jobs if job not in have), key=lambda job: job.seed)  # all tasks once, then again
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them already done.", flush=True)
    KEPT.parent.mkdir(exist_ok=True)
    pool, began = ThreadPoolExecutor(AT_ONCE), time.time()
    try:
        for done, future in enumerate(as_completed([pool.submit(run_apart, job) for job in missing]), 1):
            row = future.result()
            with KEPT.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            left = (time.time() - began) / done * (len(missing) - done)
            print(f"[{done}/{len(missing)}, {left / 60:.0f} min left] {_told(row)}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # a run that broke or Ctrl-C: what has not begun is for the next call


def _outcome(row: Row) -> Outcome:
    return Outcome(*(row[name] for name in Outcome._fields))


def _told(row: Row) -> str:
    outcome = _outcome(row)
    verdict = "passes" if outcome.passes(TASKS[row["task"]]) else "FAILS"
    reached = "" if outcome.reached is None else f" reached at {outcome.reached:,},"
    return (
        f"{row['task']} seed {row['seed']} {verdict}:{reached} best {outcome.best:.4g}, "
        f"final {outcome.final:.4g}, {outcome.steps:,} steps in {outcome.seconds:.0f} s"
    )


INTRO = """# Learning results

Written by `python -m benchmarks.learning --write`, which runs missing tasks, two at a time with one thread each,
and stores results by task, seed, commit and settings; `--task NAME …` selects tasks, and with
`--any-commit` results of other commits are used too if their settings are equal. `make test-slow` tests the same tasks
([learning_tasks.py](../tests/learning/learning_tasks.py)); toy tasks that take seconds are in `make test`.

Every few thousand steps the policy plays 100 greedy episodes, on separate environments and seeds. A seed passes if the
mean return of such an evaluation reaches the target within the given number of steps; the run ends there unless noted.
Settings are the environment's [preset](../ludus/settings/presets) and those named below. Steps are environment steps
over all environments. Seconds are wall time on a shared machine, not a benchmark. Commits are the last that changed
`ludus/`; a + means uncommitted changes to it. The tasks of `breakout` need MinAtar (`pip install --no-deps minatar`)
and are left out without it.

Most runs are those of commit 7cca29e (388 runs); newer ones have their commit beside them. Runs that earlier versions
of this page had gave the same numbers. On another kind of CPU the last digits differ, and so do the steps: PPO on
CartPole took 40,203 steps with seed 0 there, and 20,001, 20,029, 5,046, 10,130, 20,053, 15,216, 30,165, 25,116 and
30,187 with seeds 1 to 9.
RL Zoo's single runs, for comparison: TRPO 500 on CartPole, −83 on Acrobot and −175 on Pendulum at 100,000 steps, and
262 on LunarLanderContinuous-v2 at 200,000; ARS 500 on CartPole at 50,000, −83 on Acrobot at 500,000 and −213 on
Pendulum at 2,000,000. These are the targets here, on Acrobot and for TRPO on Pendulum less the standard error of 100
episodes (2 and 10). TQC has −151 on Pendulum at 20,000 (these runs end at −200), and ARS 168 on
LunarLanderContinuous-v2 at 2,000,000, where its preset has −71, 274, 280, 192 and 257 at best with seeds 0 to 4
(`ludus train LunarLanderContinuous-v3 --agent ars --seed 0 --evaluation.episodes 100`).
TRPO on LunarLanderContinuous explores by gSDE; with independent Gaussian noise (`--agent.distribution gaussian
--agent.target-kl 0.02`) the best evaluations of seeds 0 to 4 were 206, 248, 227, 225 and 270 on another kind of CPU.
Settings were chosen on the seeds 10 to 13 (TRPO on LunarLanderContinuous), 10 to 12 (REINFORCE on Pendulum), 10 to 16
(ARS on LunarLanderContinuous), 0 to 5 (ARS on Pendulum; the last policies of seeds 10 to 19 have −182 to −142), 0 to 4
(ARS on CartPole; seeds 5 to 9 reach 500 too) and 0 (REINFORCE on LunarLanderContinuous).

Elsewhere: [behaviour cloning, DAgger and GAIL](imitation.md#measured), [offline
agents](off_policy.md#recorded-episodes), [several agents](multiagent.md#measured), also [against
BenchMARL](benchmarks.md#several-agents), and [workers and ranks](containers.md).
"""


def write(jobs: list[Job], have: dict[Job, Row]) -> None:
    """Write docs/results.md from the stored results."""
    by_task = {name: [have[job] for job in jobs if job.task == name and job in have] for name in TASKS}
    parts = [INTRO, _summary(by_task)] + [
        _seeds(task, by_task[task.name]) for task in (*CLASSIC, *IMAGES, *OFF_POLICY) if by_task[task.name]
    ]
    parts.append(_toys(by_task))
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    print(f"Wrote {PAGE.relative_to(ROOT)}.")


def _summary(by_task: dict[str, list[Row]]) -> str:
    lines = ["| task | target | passed | steps to the target: median (worst) |", "|---|---|---|---|"]
    for name, rows in by_task.items():
        if not rows:
            continue
        task = TASKS[name]
        passed = sum(_outcome(row).passes(task) for row in rows)
        steps = sorted(row["reached"] for row in rows if row["reached"] is not None)
        reached = f"{steps[(len(steps) - 1) // 2]:,} ({steps[-1]:,})" if steps else "never"
        sign = "stays below" if task.beyond else "≥"
        lines.append(f"| {name} | {sign} {task.target:g} | {passed} of {len(rows)} | {reached} |")
    return "\n".join(lines) + "\n"


def _seeds(task: Task, rows: list[Row]) -> str:
    demand = "must stay below" if task.beyond else "must reach"
    beside = ", ".join(f"`{key}={value}`" for key, value in task.settings.items())
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    lines = [
        f"## {task.name}\n",
        f"{task.agent.upper()} on `{task.environment}`{', with ' + beside if beside else ''}: {demand} {task.target:g} "
        f"within {task.nb_step:,} steps, evaluated every {task.every:,}"
        f"{'; runs to the last step' if task.whole else ''}. Commit {commits}.\n",
        "| seed | steps to the target | best evaluation | last evaluation | steps | seconds | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        outcome = _outcome(row)
        reached = "never" if outcome.reached is None else f"{outcome.reached:,}"
        verdict = "passes" if outcome.passes(task) else "**fails**"
        lines.append(
            f"| {row['seed']} | {reached} | {outcome.best:.4g} | {outcome.final:.4g} | {outcome.steps:,} | "
            f"{outcome.seconds:.0f} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def _toys(by_task: dict[str, list[Row]]) -> str:
    lines = [
        "## Toys\n",
        "Steps to the target and the evaluation there, by seed; if the target must not be reached, the best "
        "evaluation. Settings are in [learning_tasks.py](../tests/learning/learning_tasks.py).\n",
        "| task | environment | commit | seeds 0, 1, 2 |",
        "|---|---|---|---|",
    ]
    for task in (task for task in (*TOYS, *OFF_POLICY_TOYS) if by_task[task.name]):
        rows = by_task[task.name]
        told = ", ".join(f"{r['best']:.3g}" + (f" at {r['reached']:,}" if r["reached"] else "") for r in rows)
        commits = ", ".join(sorted({row["commit"] for row in rows}))
        lines.append(f"| {task.name} | `{task.environment.rpartition(':')[2]}` | {commits} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the learning tasks and store their results.")
    parser.add_argument(
        "--task",
        nargs="+",
        metavar="TASK",
        choices=list(TASKS),
        default=[name for name, task in TASKS.items() if not task.needs or importlib.util.find_spec(task.needs)],
        help="only these, such as cartpole/ppo",
    )
    parser.add_argument("--any-commit", action="store_true", help="use results of other commits with equal settings")
    parser.add_argument("--write", action="store_true", help="write docs/results.md from the stored results")
    parser.add_argument("--one", nargs=2, metavar=("TASK", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one[0], int(args.one[1]))
        return
    at = ANY if args.any_commit else commit()
    run_all(jobs_of((TASKS[name] for name in args.task), at), kept(at))
    if args.write:
        write(jobs_of(TASKS.values(), at), kept(at))


if __name__ == "__main__":
    main()
