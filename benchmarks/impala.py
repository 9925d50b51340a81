"""APPO with two workers against Sample Factory's, on CartPole: ``python -m benchmarks.impala --peer PYTHON``.

PYTHON is the interpreter of a virtual environment of its own with ``pip install sample-factory==2.1.1``, as it needs an
older gymnasium. Rounds are interleaved, each in new processes. Both sides have the same workers, environments per
worker, unrolls, minibatches, epochs and network, and single gymnasium environments that a worker steps one after the
other; steps are transitions of environments that the learner has learned from. Ludus corrects for old policies by
V-trace; Sample Factory has GAE, its default, which costs less.
``python -m benchmarks.impala --round ludus`` runs one round and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

from benchmarks.protocol import Meter, emit
from benchmarks.report import quartiles, ratios
from benchmarks.sample_factory import ENVIRONMENTS, EPOCHS, HIDDEN, MINIBATCHES, PEER, ROLLOUT, WORKERS

TARGET = 1.5  # how many times faster Ludus must be, by the median
COMPILE = {"ludus": "auto", "ludus uncompiled": "off"}
SETTINGS: dict[str, Any] = {
    "container": "impala",
    "impala.workers": WORKERS,
    "env.num": WORKERS * ENVIRONMENTS,
    "env.backend": "simple",
    "network.hidden": HIDDEN,
    "network.activation": "tanh",
    "network.shared": "yes",
    "agent.rollout": ROLLOUT,
    "agent.epochs": EPOCHS,
    "agent.minibatches": MINIBATCHES,
    "agent.learning_rate": 2.5e-4,
    "agent.learning_rate_schedule": "constant",
    "agent.clip": 0.2,
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
REPORTED = ("impala/learner_waits", "impala/workers_wait", "impala/lag", "return")


def play(side: str, warm_up: float, seconds: float, seed: int) -> None:
    """Run one round of Ludus: warm up, then measure."""
    import ludus

    meter, last = Meter(warm_up, seconds, at_first_update=True), dict[str, float]()

    def on_update(values: Any) -> bool:
        enough = meter.update(int(values["step"]))
        if enough:
            last.update({name: values[name] for name in REPORTED})
        return not enough

    changes = {"runs": tempfile.mkdtemp(prefix="ludus-"), "compile": COMPILE[side]}
    ludus.train(
        "CartPole-v1",
        "appo",
        preset="none",
        nb_step=100_000_000,
        seed=seed,
        settings=SETTINGS | changes,
        on_update=on_update,
    )
    emit(side=side, rate=meter.rate, **last)


def table(rounds: dict[str, list[dict[str, Any]]]) -> str:
    """Return one row per side; the target is met if the median of the ratio reaches it."""
    lines = [
        "| | steps/s, median (quartiles) | ratio (quartiles) | target | met | learner waits | lag | return | rounds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for side, played in rounds.items():
        low, middle, high = quartiles([r["rate"] for r in played])
        ratio, met, waits, lag = "1", "|", "", ""
        if side != PEER:
            r_low, r_middle, r_high = quartiles(ratios(played, rounds[PEER]))
            ratio = f"**{r_middle:.2f}** ({r_low:.2f} to {r_high:.2f})"
            met = f"{TARGET} | {'yes' if r_middle >= TARGET else 'no'}"
            waits = f"{quartiles([r['impala/learner_waits'] for r in played])[1]:.0%}"
            lag = f"{quartiles([r['impala/lag'] for r in played])[1]:.1f}"
        returns = quartiles([r["return"] for r in played])[1]
        lines.append(
            f"| {side} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) | {ratio} | {met} | {waits} | {lag} "
            f"| {returns:.0f} | {len(played)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="APPO against Sample Factory's.")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter that has Sample Factory")
    parser.add_argument("--round", choices=list(COMPILE), help="run one round of this side")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds after the first update")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each round is measured")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.round:
        play(args.round, args.warm_up, args.seconds, args.seed)
        return
    if not args.peer:
        parser.error("give --peer PYTHON, the interpreter of an environment with sample-factory")
    from benchmarks.harness import BUSY, call, machine, save

    taken_on = machine()
    sides = [PEER, *COMPILE]
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for round_ in range(args.rounds):
        for side in sides if round_ % 2 == 0 else sides[::-1]:
            words = ["--warm-up", str(args.warm_up), "--seconds", str(args.seconds), "--seed", str(round_)]
            if side == PEER:
                rounds[side].append(call("benchmarks.sample_factory", *words, python=args.peer))
            else:
                rounds[side].append(call("benchmarks.impala", "--round", side, *words))
    save("impala", json.loads(json.dumps({"rounds": rounds})), taken_on)
    print(f"\n{table(rounds)}")
    if taken_on["load"] > BUSY:
        print(f"\nThe load was {taken_on['load']:.1f} at the start: do not publish these results.")


if __name__ == "__main__":
    main()
