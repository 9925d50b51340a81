"""Kill workers repeatedly in one run, which must continue and learn: environment workers, and those of IMPALA."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.soak_kills import the_run
from benchmarks.soak_watch import (
    Part,
    Sampler,
    Tell,
    all_gone,
    kill_tree,
    last_step,
    left_behind,
    mark,
    named_memory,
    send,
    start,
    workers,
)
from ludus.logging.metrics import read_metrics

STEPS, TARGET = 200_000, 475.0
WATCHED = f"--nb-step {STEPS} --log-every 250 --evaluation.every 20000 --threads 1 --compile off --quiet"
SPREAD = 0.9  # the last kill is due when so much of the run is done
FDS, MEMORY = 4, 20.0  # growth of descriptors and of memory (MB) that is no leak
PATIENCE = 900.0  # seconds for the whole run


class Victim(NamedTuple):
    """A kind of run, and the signals that its workers get at random."""

    train: str
    signals: list[signal.Signals]


ENVIRONMENTS = Victim(
    f"CartPole-v1 {WATCHED} --env.backend subproc --env.workers 2 --env.max-restarts 100000 --env.timeout 1",
    [signal.SIGKILL] * 7 + [signal.SIGTERM] * 2 + [signal.SIGSTOP],
)
IMPALA = Victim(
    f"""CartPole-v1 {WATCHED} --agent vtrace --container impala --workers 2 --impala.max-restarts 100000
    --agent.rollout 20 --agent.optimizer adam --agent.optimizer-eps 1e-5 --agent.learning-rate 2e-3
    --agent.learning-rate-schedule linear""",
    [signal.SIGKILL],
)


def run(victim: Victim, count: int, seed: int, tell: Tell) -> Part:
    """Kill ``count`` workers, spread evenly over the run."""
    folder, before, marked = Path(tempfile.mkdtemp(prefix="ludus-workers-")), named_memory(), mark()
    rng = random.Random(seed)
    with (folder / "stderr").open("w") as errors:
        process = start(["train", *victim.train.split(), "--runs", str(folder / "runs")], marked, folder, errors)
    sampler = Sampler(marked)
    sampler.root = process.pid
    try:
        sent = _inject(process, marked, folder, count, victim.signals, rng, tell)
    finally:
        sampler.stop()
        if process.poll() is None:
            kill_tree(process, marked)
    left, stays, broken = all_gone(marked), left_behind(before), list[str]()
    run = the_run(folder / "runs")
    if process.returncode or run is None:
        broken.append(f"the run ended with {process.returncode}: {(folder / 'stderr').read_text()[-500:]}")
    figures = _figures(run, sent, sampler, broken) | {
        "processes left behind": left,
        "semaphores and shared memory left behind": len(stays),
        "sockets that others could reach": len(sampler.sockets),
    }
    if sent.total() < count:
        broken.append(f"only {sent.total()} of {count} workers were hit")
    if left or stays or sampler.sockets:
        broken.append(f"left behind: {left} processes, {stays}; sockets: {sorted(sampler.sockets)}")
    if not broken:
        shutil.rmtree(folder)
    return Part(figures, broken)


def _inject(
    process: Any,
    marked: str,
    folder: Path,
    count: int,
    signals: list[signal.Signals],
    rng: random.Random,
    tell: Tell,
) -> Counter[str]:
    """Send a signal to a worker whenever the run has reached the next step."""
    sent, until, hit = Counter[str](), time.monotonic() + PATIENCE, set[int]()
    while process.poll() is None and time.monotonic() < until:
        run = the_run(folder / "runs")
        step = last_step(run / "metrics.jsonl") if run else 0
        tell(step / STEPS, f"{sent.total()} of {count} workers hit, step {step:,} of {STEPS:,}")
        if sent.total() < min(count, count * step / (SPREAD * STEPS)):
            fresh = [pid for pid in workers(marked, process.pid) if pid not in hit]
            if fresh:
                victim, number = rng.choice(fresh), rng.choice(signals)
                send([victim], number)
                hit.add(victim)
                sent[number.name] += 1
        time.sleep(rng.uniform(0, 0.05))
    return sent


def _figures(run: Path | None, sent: Counter[str], sampler: Sampler, broken: list[str]) -> dict[str, Any]:
    log = (run / "log.txt").read_text() if run else ""
    lines = read_metrics(run / "metrics.jsonl") if run else []
    evaluations = [(int(line["step"]), line["evaluation/mean"]) for line in lines if "evaluation/mean" in line]
    solved = next((step for step, mean in evaluations if mean >= TARGET), None)
    steps = last_step(run / "metrics.jsonl") if run else 0
    fds, memory = sampler.growth()
    if steps < STEPS:
        broken.append(f"the run ended at step {steps:,} of {STEPS:,}")
    if solved is None:
        broken.append(f"no evaluation reached {TARGET:g}: {evaluations}")
    if fds > FDS or memory > MEMORY:
        broken.append(f"descriptors grew by {fds:g}, memory by {memory:.1f} MB")
    seen = sampler.samples[len(sampler.samples) // 2] if sampler.samples else None
    return {
        "workers hit": f"{sent.total()} ({', '.join(f'{n} {name}' for name, n in sent.most_common())})",
        "reported in the log": sum(log.count(said) for said in ("was killed by SIG", "hung: no answer within")),
        **_versions(lines, broken),
        "steps": steps,
        f"evaluation reached {TARGET:g} at step": solved,
        "best evaluation": max((mean for _, mean in evaluations), default=None),
        "processes at once, at most": max((s.processes for s in sampler.samples), default=0),
        "descriptors of the trainer": f"{seen.fds if seen else 0}, grew by {fds:g} (allowed: {FDS})",
        "memory of the trainer": f"{seen.memory if seen else 0:.0f} MB, grew by {memory:.1f} (allowed: {MEMORY:g})",
    }


def _versions(lines: list[dict[str, float]], broken: list[str]) -> dict[str, Any]:
    """Return the figures of IMPALA, if this is it: versions of the weights must increase."""
    versions = [int(line["impala/version"]) for line in lines if "impala/version" in line]
    if not versions:
        return {}
    if any(later <= earlier for earlier, later in pairwise(versions)):
        broken.append("versions of the weights did not increase")
    numbers = [line for line in lines if "impala/version" in line]
    lags = [
        int(name.removeprefix("impala/lag_")) for line in numbers for name in line if name.startswith("impala/lag_")
    ]
    return {
        "workers replaced": int(numbers[-1]["impala/restarts"]),
        "versions of the weights, increasing in every line of metrics": versions[-1],
        "largest lag of an unroll, in versions": max(lags),
    }
