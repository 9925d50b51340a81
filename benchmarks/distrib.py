"""Data-parallel training: two ranks against one, on CartPole with 200 µs of CPU time added to each step.

``python -m benchmarks.distrib`` runs interleaved rounds, each in a new process, and prints the table;
``python -m benchmarks.distrib --ranks 2`` runs one round and prints one line of JSON. Both sides run PPO with the same
settings, one thread per rank, and as many environments in total. Steps are those of all ranks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

from gymnasium.envs.classic_control import CartPoleEnv

from benchmarks.protocol import Meter, emit
from benchmarks.report import quartiles, ratios

WORK = 200e-6  # seconds of CPU time that a step takes more
TARGET = 1.6  # how many times faster two ranks must be, by the lower quartile
SIDES = (1, 2)  # ranks
SETTINGS: dict[str, Any] = {
    "env.num": 8,
    "env.backend": "simple",
    "env.max_episode_steps": 500,
    "agent.rollout": 128,
    "agent.epochs": 4,
    "agent.minibatches": 4,
    "compile": "off",
    "threads": 1,
    "evaluation.every": 0,
    "evaluation.episodes": 1,
    "checkpoint_every": 0,
    "quiet": True,
}


class BusyCartPole(CartPoleEnv):
    """CartPole whose steps take 200 µs of CPU time more."""

    def step(self, action: Any) -> Any:
        """Work, then step."""
        until = time.thread_time() + WORK
        while time.thread_time() < until:
            pass
        return super().step(action)


def play(ranks: int, seconds: float, seed: int) -> None:
    """Run one round: warm up, then measure."""
    import ludus

    meter = Meter(seconds / 5, seconds)
    settings = SETTINGS | {"runs": tempfile.mkdtemp(prefix="ludus-"), "container": "distrib", "distrib.ranks": ranks}
    if ranks == 1:
        settings |= {"container": "local", "distrib.ranks": 0}
    ludus.train(
        "benchmarks.distrib:BusyCartPole",
        preset="none",
        nb_step=100_000_000,
        seed=seed,
        settings=settings,
        on_update=lambda numbers: not meter.update(int(numbers["step"])),
    )
    emit(ranks=ranks, rate=meter.rate)


def table(rounds: dict[int, list[dict[str, Any]]]) -> str:
    """Return one row per side; the target is met if the lower quartile of the ratio reaches it."""
    lines = ["| ranks | steps/s, median (quartiles) | faster by | target | met | rounds |", "|---|---|---|---|---|---|"]
    for ranks, played in rounds.items():
        low, middle, high = quartiles([r["rate"] for r in played])
        line = f"| {ranks} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) |"
        if ranks == 1:
            lines.append(f"{line} 1 | | | {len(played)} |")
            continue
        r_low, r_middle, r_high = quartiles(ratios(played, rounds[1]))
        met = "yes" if r_low >= TARGET else "no"
        lines.append(f"{line} **{r_middle:.2f}** ({r_low:.2f} to {r_high:.2f}) | {TARGET} | {met} | {len(played)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Two ranks against one.")
    parser.add_argument("--ranks", type=int, choices=SIDES, help="run one round with this number of ranks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each round is measured")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.ranks:
        play(args.ranks, args.seconds, args.seed)
        return
    from benchmarks.harness import BUSY, call, machine, save

    taken_on = machine()
    rounds: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in SIDES}
    for round_ in range(args.rounds):
        for ranks in SIDES if round_ % 2 == 0 else SIDES[::-1]:
            words = ["--ranks", str(ranks), "--seconds", str(args.seconds), "--seed", str(round_)]
            rounds[ranks].append(call("benchmarks.distrib", *words))
    save("distrib", json.loads(json.dumps({"rounds": rounds})), taken_on)
    print(f"\n{table(rounds)}")
    if taken_on["load"] > BUSY:
        print(f"\nThe load was {taken_on['load']:.1f} at the start: do not publish these results.")


if __name__ == "__main__":
    main()
