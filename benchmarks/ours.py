"""Ludus on the jobs of ``protocol.py``: ``python -m benchmarks.ours cartpole --threads 1``."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from typing import Any

import ludus
from benchmarks.protocol import (
    EVALUATION_EPISODES,
    EVALUATION_EVERY,
    JOBS,
    SOLVED,
    Meter,
    PPOSettings,
    arguments,
    emit,
)

SIDE = {"auto": "ludus", "off": "ludus uncompiled", "on": "ludus compiled"}


class Enough(Exception):
    """Raised by a hook to end a run."""


def settings_of(job: str, s: PPOSettings, args: Namespace) -> dict[str, Any]:
    schedule = "linear" if s.linear else "constant"
    lstm = {"network.net1d": "identity1d", "network.body": "lstm", "network.head1d": "mlp", "network.lstm_size": s.lstm}
    return {
        **(lstm if s.lstm else {}),
        "env.num": args.environments or s.environments,
        "env.backend": "envpool" if job == "pong" else "vector",
        "network.shared": "yes" if job == "pong" else "no",
        "agent.rollout": s.rollout,
        "agent.epochs": s.epochs,
        "agent.minibatches": s.minibatches,
        "agent.learning_rate": s.learning_rate,
        "agent.learning_rate_schedule": schedule,
        "agent.gamma": s.gamma,
        "agent.gae_lambda": s.gae_lambda,
        "agent.clip": s.clip,
        "agent.clip_schedule": schedule,
        "agent.entropy_coef": s.entropy,
        "agent.value_coef": s.value,
        "agent.max_grad_norm": s.max_grad_norm,
        "agent.normalize_observation": False,  # as in SB3
        "agent.normalize_reward": False,
        "evaluation.every": EVALUATION_EVERY if job == "solve" else 0,
        "evaluation.episodes": EVALUATION_EPISODES,
        "evaluation.environments": EVALUATION_EPISODES,
        "evaluation.stop_at": SOLVED if job == "solve" else None,
        "log_every": 1,  # as often as SB3: after every update
        "threads": args.threads,
        "compile": args.compile,
        "runs": tempfile.mkdtemp(prefix="ludus-"),
        "quiet": True,
    }


def train(args: Namespace, on_update: Any = None) -> Any:
    s = JOBS[args.job]
    return ludus.train(
        "Pong-v5" if args.job == "pong" else "CartPole-v1",
        agent="ppo",
        nb_step=s.steps,
        seed=args.seed,
        preset="none",
        settings={k: v for k, v in settings_of(args.job, s, args).items() if v is not None},
        on_update=on_update,
    )


def measure(args: Namespace) -> float:
    """Return environment steps per second, without resets."""
    meter = Meter(args.warm_up, args.seconds)

    def watch(metrics: Any) -> None:
        if meter.update(int(metrics["step"])):
            raise Enough

    try:
        train(args, watch)
    except Enough:
        return meter.rate
    raise RuntimeError("The run ended before the time did.")


def solve(args: Namespace) -> dict[str, Any]:
    result = train(args)
    seconds = time.time() - args.started
    score = float(result.evaluation.mean)
    return {"seconds": seconds, "step": result.steps, "score": score, "solved": score >= SOLVED}


def start(args: Namespace) -> float:
    """Return the seconds from process start to the end of the first update."""

    def stop(metrics: Any) -> None:
        raise Enough

    try:
        train(args, stop)
    except Enough:
        return time.time() - float(args.started)
    raise RuntimeError("The run ended before the first update.")


def main() -> None:
    parser = arguments("One round of Ludus.")
    parser.add_argument("--compile", choices=list(SIDE), default="auto", help="auto: the library decides")
    parser.add_argument("--environments", type=int, default=0, help="0: the job's own number")
    args = parser.parse_args()
    common = {"side": SIDE[args.compile], "job": args.job, "threads": args.threads, "seed": args.seed}
    if args.first_update:
        emit(**common, seconds=start(args))
    elif args.job == "solve":
        emit(**common, **solve(args))
    else:
        emit(**common, environments=args.environments, rate=measure(args))


if __name__ == "__main__":
    main()
