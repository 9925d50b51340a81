"""APPO with two workers against Sample Factory's, on CartPole and Pong: ``python -m benchmarks.impala --peer PYTHON``.

PYTHON is the interpreter of a virtual environment of its own, as Sample Factory needs an older gymnasium:
``pip install sample-factory==2.1.1 envpool==1.2.5 torch==2.13.0``. Rounds are interleaved, each in new processes. Both
sides have the same workers, environments per worker, unrolls, minibatches, epochs and network, and one torch thread in
each process. CartPole: single gymnasium environments that a worker steps one after the other. Pong: an EnvPool with one
thread in each worker, a Nature CNN. Steps are transitions of environments that the learner has learned from. Ludus
corrects for old policies by V-trace; Sample Factory has GAE, its default, which costs less.
``python -m benchmarks.impala pong --round ludus`` runs one round and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from benchmarks.protocol import Meter, emit
from benchmarks.report import quartiles, ratios
from benchmarks.sample_factory import ENVIRONMENTS, HIDDEN, JOBS, PEER, PONG_THREADS, WORKERS

COMPILE = {"ludus": "auto", "ludus uncompiled": "off"}
SETTINGS: dict[str, Any] = {
    "container": "impala",
    "impala.workers": WORKERS,
    "env.num": WORKERS * ENVIRONMENTS,
    "network.shared": "yes",
    "agent.learning_rate": 2.5e-4,
    "agent.learning_rate_schedule": "constant",
    "agent.clip_schedule": "constant",
    "agent.entropy_coef": 0.01,
    "agent.value_coef": 0.5,
    "agent.max_grad_norm": 0.5,
    "agent.normalize_observation": False,
    "agent.normalize_reward": False,
    "evaluation.every": 0,
    "evaluation.episodes": 1,
    "checkpoint_every": 0,
    "threads": 1,
    "quiet": True,
}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": {"env.backend": "simple", "network.hidden": HIDDEN, "network.activation": "tanh"},
    "pong": {"env.backend": "envpool", "env.options": (f"num_threads={PONG_THREADS}",)},
}
REPORTED = ("impala/learner_waits", "impala/workers_wait", "impala/lag", "impala/copies", "return")


class Enough(Exception):
    """Raised by a hook to end a run, without an evaluation."""


def settings_of(name: str, side: str) -> dict[str, Any]:
    """Return the settings of a job."""
    job = JOBS[name]
    return {
        **SETTINGS,
        **OWN_SETTINGS[name],
        "agent.rollout": job.rollout,
        "agent.epochs": job.epochs,
        "agent.minibatches": job.minibatches,
        "agent.clip": job.clip,
        "compile": COMPILE[side],
        "runs": tempfile.mkdtemp(prefix="ludus-"),
    }


def play(name: str, side: str, warm_up: float, seconds: float, seed: int) -> None:
    """Run one round of Ludus: warm up, then measure."""
    import ludus

    meter, last = Meter(warm_up, seconds, at_first_update=True), dict[str, float | None]()

    def on_update(values: Any) -> None:
        if meter.update(int(values["step"])):
            last.update({key: values.get(key) for key in REPORTED})
            raise Enough

    try:
        ludus.train(
            JOBS[name].environment,
            "appo",
            preset="none",
            nb_step=100_000_000,
            seed=seed,
            settings=settings_of(name, side),
            on_update=on_update,
        )
    except Enough:
        emit(side=side, rate=meter.rate, **last)


def table(name: str, rounds: dict[str, list[dict[str, Any]]]) -> str:
    """Return one row per side; the target is met if the median of the ratio reaches it."""
    lines = [
        f"| {name} | steps/s, median (quartiles) | ratio (quartiles) | target | met | learner waits | lag "
        "| return | rounds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    target = JOBS[name].target
    for side, played in rounds.items():
        low, middle, high = quartiles([r["rate"] for r in played])
        ratio, met, waits, lag = "1", "|", "", ""
        if side != PEER:
            r_low, r_middle, r_high = quartiles(ratios(played, rounds[PEER]))
            ratio = f"**{r_middle:.2f}** ({r_low:.2f} to {r_high:.2f})"
            met = f"{target} | {'yes' if r_middle >= target else 'no'}"
            waits = f"{quartiles([r['impala/learner_waits'] for r in played])[1]:.0%}"
            lag = f"{quartiles([r['impala/lag'] for r in played])[1]:.1f}"
        returns = [r["return"] for r in played if r["return"] is not None]  # no episode of Pong may have ended
        mean = f"{quartiles(returns)[1]:.0f}" if returns else ""
        lines.append(
            f"| {side} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) | {ratio} | {met} | {waits} | {lag} "
            f"| {mean} | {len(played)} |"
        )
    return "\n".join(lines)


def contest(name: str, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run the rounds of a job, in turn."""
    from benchmarks.harness import call

    job = JOBS[name]
    times = ["--warm-up", str(args.warm_up or job.warm_up), "--seconds", str(args.seconds or job.seconds)]
    sides = [PEER, *COMPILE]
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for round_ in range(args.rounds):
        for side in sides if round_ % 2 == 0 else sides[::-1]:
            words = [name, *times, "--seed", str(round_)]
            if side == PEER:
                rounds[side].append(call("benchmarks.sample_factory", *words, python=args.peer))
            else:
                rounds[side].append(call("benchmarks.impala", *words, "--round", side))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description="APPO against Sample Factory's.")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"any of {', '.join(JOBS)}; default: all")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter that has Sample Factory")
    parser.add_argument("--round", choices=list(COMPILE), help="run one round of this side")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=float, help="seconds after the first update; default: the job's own")
    parser.add_argument("--seconds", type=float, help="how long each round is measured; default: the job's own")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jobs = args.jobs or list(JOBS)
    if unknown := set(jobs) - set(JOBS):
        parser.error(f"no such job: {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    if args.round:
        for name in jobs:
            play(name, args.round, args.warm_up or JOBS[name].warm_up, args.seconds or JOBS[name].seconds, args.seed)
        return
    if not args.peer:
        parser.error("give --peer PYTHON, the interpreter of an environment with sample-factory")
    from benchmarks.harness import BUSY, machine, save

    taken_on = machine()
    for name in jobs:
        rounds = contest(name, args)
        save(f"impala_{name}", {"rounds": rounds}, taken_on)
        print(f"\n{table(name, rounds)}")
    if taken_on["load"] > BUSY:
        print(f"\nThe load was {taken_on['load']:.1f} at the start: do not publish these results.")


if __name__ == "__main__":
    main()
