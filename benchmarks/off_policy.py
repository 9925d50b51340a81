"""DQN, SAC and TD3: Ludus against Stable-Baselines3, CleanRL-style loops, Tianshou and the limit of bare code.

``python -m benchmarks.off_policy dqn10 dqn1 sac td3`` runs jobs (default: all) in interleaved rounds, each in a new
process with the best number of threads and backend of each library, and prints tables; ``python -m
benchmarks.off_policy sac --side sb3`` runs one round and prints one line of JSON. Only steps after the warm-up count.
Tianshou is included if ``LUDUS_TIANSHOU_PYTHON`` names an interpreter that has it (and, for SAC and TD3, mujoco).
``python -m benchmarks.off_policy curves --job sac`` compares learning curves: see ``off_policy_curves.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from benchmarks.off_policy_jobs import JOBS, OffPolicySettings, SettledMeter
from benchmarks.protocol import emit

Result = dict[str, Any]
Play = Callable[[OffPolicySettings, str, int, SettledMeter], float]
MODULE, TIANSHOU = "benchmarks.off_policy", "LUDUS_TIANSHOU_PYTHON"
SIDES = ("ludus", "ludus-compiled", "sb3", "cleanrl", "tianshou")  # "bare" is measured separately
BACKENDS = {"ludus": ("simple", "vector"), "ludus-compiled": ("simple", "vector"), "sb3": ("simple", "vector")}
TARGETS = {  # (job, side): the median ratio to Stable-Baselines3 to reach
    ("dqn10", "ludus"): 2.2,
    ("dqn10", "ludus-compiled"): 2.2,
    ("dqn1", "ludus"): 1.9,
    ("dqn1", "ludus-compiled"): 1.9,
    ("sac", "ludus"): 1.2,
    ("sac", "ludus-compiled"): 1.5,
    ("td3", "ludus"): 1.15,
    ("td3", "ludus-compiled"): 1.35,
}


class Enough(Exception):
    """Raised by a hook to end a run."""


def ludus_settings(s: OffPolicySettings) -> dict[str, Any]:
    """Return the job's settings under their names in Ludus."""
    common = {
        "env.num": 1,
        "network.orthogonal": False,  # PyTorch's default weights, as in the other libraries
        "agent.replay": s.replay,
        "agent.batch_size": s.batch,
        "agent.warmup": s.learning_starts,
        "agent.updates_per_step": 1 / s.train_every,
        "agent.learning_rate": s.learning_rate,
        "agent.gamma": s.gamma,
        "agent.save_replay": False,
        "log_every": s.log_every,
        "checkpoint_every": 0,
        "quiet": True,
    }
    if s.hidden:
        common |= {"network.hidden": s.hidden, "network.activation": "relu"}
    else:
        common |= {"network.net3d": "benchmarks.off_policy_minatar:SmallCNN"}
    if s.agent == "dqn":
        return common | {
            "agent.target_every": s.target_every // s.train_every,  # it counts updates
            "agent.max_grad_norm": s.max_grad_norm,
            "agent.epsilon_start": s.epsilon[0],
            "agent.epsilon_end": s.epsilon[1],
            "agent.epsilon_share": s.explore / s.steps,
        }
    common |= {"agent.tau": s.tau}
    if s.agent == "td3":
        common |= {
            "agent.policy_delay": s.policy_delay,
            "agent.target_noise": s.target_noise,
            "agent.target_noise_clip": s.noise_clip,
            "agent.noise_sigma": s.exploration_noise,
        }
    return common


def ludus_side(compile_: str, threads: int) -> Play:
    """Ludus, compiled or not."""

    def play(s: OffPolicySettings, backend: str, seed: int, meter: SettledMeter) -> float:
        import ludus
        from ludus.runs.report import Reporter

        def watch(self: Any, worker: Any) -> None:
            if meter.update(worker.local_step_count):
                raise Enough

        # called once per update, like a hook, but without computing metrics
        Reporter.show = watch  # type: ignore[method-assign]
        with tempfile.TemporaryDirectory(prefix="ludus-") as runs:
            round_ = {
                "env.backend": backend,
                "evaluation.every": 0,
                "threads": threads,
                "compile": compile_,
                "runs": runs,
            }
            settings = ludus_settings(s) | round_
            try:
                ludus.train(s.environment, s.agent, nb_step=s.steps, seed=seed, preset="none", settings=settings)
            except Enough:
                return meter.rate
        raise RuntimeError("The run ended before the time did.")

    return play


def player(side: str, threads: int) -> Play:
    """Return the function that runs a side; its library is imported here."""
    if side.startswith("ludus"):
        return ludus_side("on" if side == "ludus-compiled" else "off", threads)
    if side == "cleanrl":
        from benchmarks.off_policy_bare import cleanrl

        return cleanrl
    from benchmarks import off_policy_peers

    return {"sb3": off_policy_peers.sb3, "tianshou": off_policy_peers.tianshou}[side]


def play(args: argparse.Namespace) -> None:
    """Run one round of one side and print one line of JSON."""
    if args.side == "tianshou" and not args.here:
        python = os.environ.get(TIANSHOU)
        if python is None:
            raise SystemExit(f"Tianshou is not installed here: set {TIANSHOU} to a Python that has it.")
        os.execv(python, [python, "-m", MODULE, *sys.argv[1:], "--here"])
    import torch

    torch.set_num_threads(args.threads)
    (job,) = args.jobs
    settings = JOBS[job]
    common = {"side": args.side, "job": job, "threads": args.threads, "seed": args.seed}
    if args.side == "bare":
        from benchmarks.off_policy_limit import limit, pieces

        found = pieces(settings, compiled=True)
        emit(**common, pieces=found, rate=limit(found, settings, "update, eager"))
        return
    details = {"version": version("tianshou")} if args.side == "tianshou" else {"backend": args.backend}
    meter = SettledMeter(settings, args.warm_up, args.seconds)
    rate = player(args.side, args.threads)(settings, args.backend, args.seed, meter)
    emit(**common, **details, rate=rate)


def contest(job: str, names: list[str], rounds: int, timed: list[str]) -> Result:
    """Pick the best variant of each side, then run the rounds."""
    from benchmarks.harness import Side, pick, take_turns

    ways = {
        name: tuple(
            Side(name, MODULE, ("--side", name, "--backend", backend))
            for backend in (BACKENDS.get(name, ("simple",)) if job.startswith("dqn") else ("simple",))
        )
        for name in names
    }
    sides = [pick(way, job, timed) for way in ways.values()]
    print(f"{job}: " + "; ".join(" ".join(side.options) for side in sides))
    played = take_turns(sides, rounds, job, timed)
    return {
        "rounds": played,
        "options": {side.name: list(side.options[2:]) for side in sides},
        "targets": {f"{name}/sb3": target for (of, name), target in TARGETS.items() if of == job},
    }


def limits(job: str) -> Result:
    """Measure bare code, each part at its best thread count, and the resulting limit."""
    from benchmarks.harness import call
    from benchmarks.off_policy_limit import limit
    from benchmarks.protocol import THREADS

    measured = [call(MODULE, job, "--side", "bare", "--threads", str(n))["pieces"] for n in THREADS]
    pieces = {name: min(m[name] for m in measured) for name in measured[0]}
    updates = [name for name in pieces if name.startswith("update")]
    return {"pieces": pieces, "limit": {name: limit(pieces, JOBS[job], name) for name in updates}}


def compare(args: argparse.Namespace) -> None:
    """Run all jobs, print the tables and save the results."""
    from benchmarks.harness import BUSY, machine, save
    from benchmarks.report import comparison_table, limit_table

    names = [name for name in args.sides if name != "tianshou" or TIANSHOU in os.environ]
    if "tianshou" in args.sides and "tianshou" not in names:
        print(f"Tianshou is left out: set {TIANSHOU} to a Python that has it.")
    taken_on, tables = machine(), []
    timed = ["--seconds", str(args.seconds), "--warm-up", str(args.warm_up)]
    for job in args.jobs or JOBS:
        result = contest(job, names, args.rounds, timed) | limits(job)
        tables += [comparison_table(job, result), limit_table(result)]
        save(f"off-policy-{job}", result | {"command": f"python -m {MODULE} {' '.join(sys.argv[1:])}"}, taken_on)
    print("\n" + "\n\n".join(tables))
    if taken_on["load"] > BUSY:
        print(f"\nThe load was {taken_on['load']:.1f} at the start: do not publish these results.")


def main() -> None:
    if sys.argv[1:2] == ["curves"]:
        from benchmarks.off_policy_curves import main as curves

        curves(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="Off-policy agents: steps per second.", epilog="Or: curves --help")
    parser.add_argument("jobs", nargs="*", help=f"any of {', '.join(JOBS)}; default: all")
    parser.add_argument("--side", choices=[*SIDES, "bare"], help="run one round of one side")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="sides to compare, including sb3")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each round is measured")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds of updates before that")
    parser.add_argument("--threads", type=int, default=1, help="one round: torch threads")
    parser.add_argument(
        "--backend", choices=["simple", "vector"], default="simple", help="one round: who steps CartPole"
    )
    parser.add_argument("--seed", type=int, default=0, help="one round: its seed")
    parser.add_argument("--started", type=float, default=time.time(), help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.jobs) - set(JOBS):
        parser.error(f"no such job: {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    if args.side and len(args.jobs) != 1:
        parser.error("--side needs exactly one job")
    if "sb3" not in args.sides:
        parser.error("--sides must include sb3, the reference of the ratios")
    if args.side:
        play(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
