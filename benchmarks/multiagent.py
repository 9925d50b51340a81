"""MAPPO on mpe2's simple_spread against BenchMARL's: ``python -m benchmarks.multiagent --peer PYTHON``.

PYTHON is the interpreter of a virtual environment of its own with ``pip install benchmarl mpe2``. Rounds are
interleaved, each in a new process with one thread. Both sides step 8 worlds one after the other and have the same
rollouts, minibatches, epochs and network sizes; steps are those of worlds. A round measures steps per second; with
``--steps N`` it trains for N steps, after which the mean returns of recent training episodes can be compared.
``python -m benchmarks.multiagent --round`` runs one round of Ludus and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from benchmarks.benchmarl import (
    CLIP,
    ENVIRONMENTS,
    EPOCHS,
    GAE_LAMBDA,
    GAMMA,
    HIDDEN,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MINIBATCHES,
    PEER,
    ROLLOUT,
    STEPS,
    WORLD,
)
from benchmarks.protocol import Meter, emit
from benchmarks.report import quartiles, ratios

TARGET = 2.0  # how many times faster Ludus must be, by the median
SETTINGS: dict[str, Any] = {
    "env.num": ENVIRONMENTS,
    "env.backend": "simple",
    "env.options": tuple(f"{name}={str(value).lower()}" for name, value in WORLD.items()),
    "network.hidden": HIDDEN,
    "network.activation": "tanh",
    "agent.rollout": ROLLOUT,
    "agent.epochs": EPOCHS,
    "agent.minibatches": MINIBATCHES,
    "agent.learning_rate": LEARNING_RATE,
    "agent.gamma": GAMMA,
    "agent.gae_lambda": GAE_LAMBDA,
    "agent.clip": CLIP,
    "agent.max_grad_norm": MAX_GRAD_NORM,
    "agent.entropy_coef": 0.0,
    "agent.normalize_observation": False,
    "evaluation.every": 0,
    "evaluation.episodes": 1,
    "checkpoint_every": 0,
    "compile": "off",
    "threads": 1,
    "quiet": True,
}


def play(warm_up: float, seconds: float, seed: int, steps: int) -> dict[str, float]:
    """Train Ludus for some seconds, or ``steps``; return steps per second and the mean return of recent episodes."""
    import ludus

    meter, found = Meter(warm_up, seconds), {"return": 0.0}

    def watch(values: Any) -> bool:
        found["return"] = float(values.get("return", found["return"]))
        enough = meter.update(int(values["step"]))
        return int(values["step"]) < steps if steps else not enough

    with tempfile.TemporaryDirectory(prefix="ludus-") as runs:
        ludus.train(
            "mpe2.simple_spread_v3:parallel_env",
            "mappo",
            nb_step=STEPS,
            seed=seed,
            preset="none",
            settings=SETTINGS | {"runs": runs},
            on_update=watch,
        )
    return {"rate": meter.rate, **found}


def table(rounds: dict[str, list[dict[str, Any]]]) -> str:
    """Return one row per side; the target is met if the median of the ratio reaches it."""
    lines = [
        "| | steps/s, median (quartiles) | ratio (quartiles) | target | met | return | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, played in rounds.items():
        low, middle, high = quartiles([r["rate"] for r in played])
        ratio, met = "1", "|"
        if side != PEER:
            r_low, r_middle, r_high = quartiles(ratios(played, rounds[PEER]))
            ratio = f"**{r_middle:.2f}** ({r_low:.2f} to {r_high:.2f})"
            met = f"{TARGET} | {'yes' if r_middle >= TARGET else 'no'}"
        returns = quartiles([r["return"] for r in played])[1]
        rates = f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"
        lines.append(f"| {side} | {rates} | {ratio} | {met} | {returns:.1f} | {len(played)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="MAPPO: Ludus against BenchMARL.")
    parser.add_argument("--peer", help="the interpreter of an environment with BenchMARL and mpe2")
    parser.add_argument("--round", action="store_true", help="run one round of Ludus")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead of seconds")
    args = parser.parse_args()
    if args.round:
        emit(side="ludus", **play(args.warm_up, args.seconds, args.seed, args.steps))
        return
    if not args.peer:
        parser.error("give --peer PYTHON, the interpreter of an environment with benchmarl and mpe2")
    from benchmarks.harness import BUSY, call, machine, save

    taken_on = machine()
    rounds: dict[str, list[dict[str, Any]]] = {PEER: [], "ludus": []}
    for round_ in range(args.rounds):
        words = ["--warm-up", str(args.warm_up), "--seconds", str(args.seconds), "--steps", str(args.steps)]
        for side in list(rounds) if round_ % 2 == 0 else list(rounds)[::-1]:
            if side == PEER:
                result = call("benchmarks.benchmarl", *words, "--seed", str(round_), python=args.peer)
            else:
                result = call("benchmarks.multiagent", "--round", *words, "--seed", str(round_))
            rounds[side].append(result)
    save("multiagent", {"rounds": rounds}, taken_on)
    print(f"\n{table(rounds)}")
    if taken_on["load"] > BUSY:
        print(f"\nThe load was {taken_on['load']:.1f} at the start: do not publish these results.")


if __name__ == "__main__":
    main()
