"""MAPPO, MADDPG and QMIX on mpe2's worlds against BenchMARL's: ``python -m benchmarks.multiagent --peer PYTHON``.

PYTHON is the interpreter of a virtual environment of its own with ``pip install benchmarl mpe2``. Rounds are
interleaved, each in a new process with one thread. Both sides step 8 worlds one after the other and have the settings
of ``benchmarks/benchmarl.py``; steps are those of worlds. A round measures steps per second; with ``--steps N`` it
trains for N steps and plays 1,000 greedy episodes, whose return is the mean of the agents' returns, and Ludus has the
settings of ``TUNED`` too.
``python -m benchmarks.multiagent --round`` runs one round of Ludus and prints one line of JSON.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from benchmarks import benchmarl as shared
from benchmarks.benchmarl import PEER
from benchmarks.protocol import Meter, emit
from benchmarks.report import quartiles, ratios

TARGET = 2.0  # how many times faster Ludus must be, by the median
COMMON: dict[str, Any] = {
    "env.num": shared.ENVIRONMENTS,
    "env.backend": "simple",
    "network.hidden": shared.HIDDEN,
    "agent.gamma": shared.GAMMA,
    "agent.optimizer_eps": shared.ADAM_EPS,
    "agent.normalize_observation": False,
    "evaluation.every": 0,
    "evaluation.episodes": shared.EPISODES,
    "checkpoint_every": 0,
    "compile": "off",
    "threads": 1,
    "quiet": True,
}


def replayed(agent: str) -> dict[str, Any]:
    """Return the settings of an agent with a replay buffer."""
    return {
        "agent.batch_size": shared.BATCH[agent],
        "agent.updates_per_step": shared.UPDATES_PER_STEP[agent],
        "agent.replay": shared.REPLAY,
        "agent.warmup": shared.WARM_UP,
    }


def exploration(agent: str, scale: float = 1.0) -> str:
    """Return the schedule of noise."""
    start, end = (scale * x for x in shared.EXPLORATION[agent])
    return f"linear({start}, {end}, share={shared.EXPLORATION_SHARE:.6f})"


OWN: dict[str, dict[str, Any]] = {
    "mappo": {
        "agent.rollout": shared.ROLLOUT,
        "agent.epochs": shared.EPOCHS,
        "agent.minibatches": shared.MINIBATCHES,
        "agent.gae_lambda": shared.GAE_LAMBDA,
        "agent.clip": shared.CLIP,
        "agent.entropy_coef": 0.0,
    },
    "maddpg": replayed("maddpg")
    | {
        "agent.tau": shared.TAU,
        "agent.cooperative": True,  # as BenchMARL's
        "agent.noise_sigma": exploration("maddpg", 2.0),  # of actions scaled to [-1, 1]
    },
    "qmix": replayed("qmix")
    | {
        "agent.target_every": shared.TARGET_EVERY,
        "agent.mixing": shared.MIXING,
        "agent.epsilon_start": shared.EXPLORATION["qmix"][0],
        "agent.epsilon_end": shared.EXPLORATION["qmix"][1],
        "agent.epsilon_share": shared.EXPLORATION_SHARE,
    },
}
# where returns are compared
TUNED: dict[tuple[str, str], dict[str, Any]] = {
    ("mappo", "simple_spread_v3"): {"agent.normalize_observation": True},
    ("mappo", "simple_speaker_listener_v4"): {
        "agent.normalize_reward": False,
        "agent.learning_rate_schedule": "linear",
    },
    ("maddpg", "simple_spread_v3"): {
        "agent.learning_rate": 2e-3,
        "agent.output_coef": 0.0,
        "network.orthogonal": False,
    },
    ("qmix", "simple_speaker_listener_v4"): {
        "agent.learning_rate_schedule": "linear",
        "agent.n_step": 3,
    },
}


def settings(agent: str, world: str) -> dict[str, Any]:
    """Return the settings of Ludus; agents of MAPPO that differ in what they see and do have a policy each."""
    options = shared.world_options(world, agent)
    return (
        COMMON
        | OWN[agent]
        | {
            "env.options": tuple(f"{name}={str(value).lower()}" for name, value in options.items()),
            "network.activation": shared.ACTIVATION[agent],
            "agent.learning_rate": shared.LEARNING_RATE[agent],
            "agent.max_grad_norm": shared.MAX_GRAD_NORM[agent],
        }
        | ({"roles": "each"} if agent == "mappo" and world == "simple_speaker_listener_v4" else {})
    )


def play(agent: str, world: str, warm_up: float, seconds: float, seed: int, steps: int) -> dict[str, float]:
    """Train Ludus for some seconds, or ``steps``; return what ``benchmarks.benchmarl`` does."""
    import ludus

    meter, found = Meter(warm_up, seconds), {"return": 0.0}

    def watch(values: Any) -> bool:
        found["return"] = float(values.get("return", found["return"]))
        return not meter.update(int(values["step"]))

    with tempfile.TemporaryDirectory(prefix="ludus-") as runs:
        result = ludus.train(
            f"mpe2.{world}:parallel_env",
            agent,
            nb_step=steps or shared.STEPS,
            seed=seed,
            preset="none",
            settings=settings(agent, world) | (TUNED.get((agent, world), {}) if steps else {}) | {"runs": runs},
            on_update=None if steps else watch,
        )
    if not steps:
        return {"rate": meter.rate, **found}
    assert result.evaluation is not None
    return {"return": result.evaluation.mean, "cpu": time.process_time(), "steps": result.steps}


def rate_table(rounds: dict[str, list[dict[str, Any]]]) -> str:
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


def return_table(rounds: dict[str, list[dict[str, Any]]]) -> str:
    """Return one row per side with the mean returns of greedy episodes."""
    lines = ["| | mean return | by seed | CPU time |", "|---|---|---|---|"]
    for side, played in rounds.items():
        returns, cpu = [r["return"] for r in played], statistics.mean(r["cpu"] for r in played)
        each = ", ".join(f"{x:.1f}" for x in returns)
        lines.append(f"| {side} | {statistics.mean(returns):.1f} | {each} | {cpu:.0f} s |")
    return "\n".join(lines)


def main() -> None:
    parser = shared.arguments("Several agents: Ludus against BenchMARL.")
    parser.add_argument("--peer", help="the interpreter of an environment with BenchMARL and mpe2")
    parser.add_argument("--round", action="store_true", help="run one round of Ludus")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both sides, with seeds from --seed on")
    args = parser.parse_args()
    if args.round:
        result = play(args.agent, args.world, args.warm_up, args.seconds, args.seed, args.steps)
        emit(side="ludus", seed=args.seed, **result)
        return
    if not args.peer:
        parser.error("give --peer PYTHON, the interpreter of an environment with benchmarl and mpe2")
    from benchmarks.harness import BUSY, call, machine, save

    taken_on = machine()
    rounds: dict[str, list[dict[str, Any]]] = {PEER: [], "ludus": []}
    given = {name: getattr(args, name) for name in ("agent", "world", "warm_up", "seconds", "steps")}
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    for round_ in range(args.rounds):
        seed = ("--seed", str(args.seed + round_))
        for side in list(rounds) if round_ % 2 == 0 else list(rounds)[::-1]:
            if side == PEER:
                result = call("benchmarks.benchmarl", *words, *seed, python=args.peer)
            else:
                result = call("benchmarks.multiagent", "--round", *words, *seed)
            rounds[side].append(result)
    save(f"multiagent_{args.agent}_{args.world}", {"rounds": rounds}, taken_on)
    print(f"\n{return_table(rounds) if args.steps else rate_table(rounds)}")
    if taken_on["load"] > BUSY and not args.steps:
        print(f"\nThe load was {taken_on['load']:.1f} at the start: do not publish these results.")


if __name__ == "__main__":
    main()
