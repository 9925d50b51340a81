"""Learning from small images: Catch with Ludus (two ways) and Stable-Baselines3. ``python -m benchmarks.catch``.

The table goes to docs/benchmarks.md. ``--seeds 1 --steps 5000`` is a short trial.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from typing import Any

from benchmarks.protocol import emit

Result = dict[str, Any]
ENVIRONMENT = "ludus.environments.image_toy:CatchEnv"
ENVIRONMENTS, ROLLOUT, EPOCHS, MINIBATCHES, LEARNING_RATE = 8, 128, 4, 4, 3e-4
RECENT = 100  # episodes at the end of training over which the return is averaged
EPISODES = 40  # of the evaluation
SIDES = {
    "ludus": "Ludus, separate CNNs for policy and value (the default below 64×64)",
    "ludus-shared": "Ludus, `--network.shared yes`",
    "sb3": "Stable-Baselines3, `CnnPolicy` (a shared CNN)",
}


def ludus_side(shared: bool, steps: int, seed: int, threads: int) -> tuple[float, float]:
    """Train with Ludus; return the mean return of the last episodes of training and of the evaluation."""
    import ludus

    settings = {
        "env.num": ENVIRONMENTS,
        "agent.rollout": ROLLOUT,
        "agent.epochs": EPOCHS,
        "agent.minibatches": MINIBATCHES,
        "agent.learning_rate": LEARNING_RATE,
        "agent.normalize_reward": False,
        "evaluation.episodes": EPISODES,
        "threads": threads,
        "quiet": True,
    } | ({"network.shared": "yes"} if shared else {})
    with tempfile.TemporaryDirectory(prefix="ludus-") as runs:
        result = ludus.train(
            ENVIRONMENT, "ppo", nb_step=steps, seed=seed, preset="none", settings=settings | {"runs": runs}
        )
        lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert result.evaluation is not None
    return [line["return"] for line in lines if "return" in line][-1], result.evaluation.mean


def sb3_side(steps: int, seed: int, threads: int) -> tuple[float, float]:
    """Train with Stable-Baselines3 and return the same."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    from ludus.environments.image_toy import CatchEnv

    torch.set_num_threads(threads)
    model = PPO(
        "CnnPolicy",
        make_vec_env(CatchEnv, ENVIRONMENTS, seed=seed),
        learning_rate=LEARNING_RATE,
        n_steps=ROLLOUT,
        batch_size=ENVIRONMENTS * ROLLOUT // MINIBATCHES,
        n_epochs=EPOCHS,
        seed=seed,
        stats_window_size=RECENT,
        device="cpu",
    )
    model.learn(steps)
    assert model.ep_info_buffer is not None
    training = statistics.mean(float(episode["r"]) for episode in model.ep_info_buffer)
    mean, _ = evaluate_policy(model, make_vec_env(CatchEnv, ENVIRONMENTS, seed=seed + 1_000), EPISODES)
    return training, float(mean)  # type: ignore[arg-type]


def compare(args: argparse.Namespace) -> None:
    """Run every seed of every side, one after the other, print the table and save the results."""
    from benchmarks.harness import call, machine, save

    taken_on = machine()
    played: dict[str, list[Result]] = {side: [] for side in SIDES}
    options = ("--steps", str(args.steps), "--threads", str(args.threads))
    for seed in range(args.seeds):
        for side in SIDES:
            played[side].append(call("benchmarks.catch", "--side", side, "--seed", str(seed), *options))
    save("catch", {"rounds": played, "command": f"python -m benchmarks.catch {' '.join(sys.argv[1:])}"}, taken_on)
    print("\n| | training, by seed | mean | evaluation, by seed | mean |\n|---|---|---|---|---|")
    for side, name in SIDES.items():
        cells = []
        for key in ("training", "evaluation"):
            found = [float(result[key]) for result in played[side]]
            cells += [", ".join(f"{x:.1f}" for x in found), f"{statistics.mean(found):.1f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning from small images.")
    parser.add_argument("--side", choices=list(SIDES), help="one run of one side")
    parser.add_argument("--seed", type=int, default=0, help="one run: its seed")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds to run, from 0")
    parser.add_argument("--steps", type=int, default=25_000, help="steps to train for")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    args = parser.parse_args()
    if not args.side:
        compare(args)
        return
    if args.side == "sb3":
        training, evaluation = sb3_side(args.steps, args.seed, args.threads)
    else:
        training, evaluation = ludus_side(args.side == "ludus-shared", args.steps, args.seed, args.threads)
    emit(side=args.side, seed=args.seed, steps=args.steps, training=training, evaluation=evaluation)


if __name__ == "__main__":
    main()
