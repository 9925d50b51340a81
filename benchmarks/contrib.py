"""TRPO, ARS, TQC and QR-DQN: Ludus against sb3-contrib, in interleaved rounds with equal settings.

``python -m benchmarks.contrib trpo ars tqc qr_dqn`` (default: all) prints the ratios of steps per second, each
round in a new process with one thread; ``python -m benchmarks.contrib trpo --side contrib`` runs one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.protocol import Meter, emit

TARGETS = {"trpo": 1.5, "ars": 3.0, "tqc": 1.5, "qr_dqn": 1.5}  # times sb3-contrib's steps per second
ENVIRONMENT = {"trpo": "CartPole-v1", "ars": "Pendulum-v1", "tqc": "Pendulum-v1", "qr_dqn": "CartPole-v1"}
REPLAY: dict[str, Any] = {
    "env.num": 1,
    "network.hidden": (256, 256),
    "network.activation": "relu",
    "agent.batch_size": 256,
    "agent.warmup": 1_000,
    "agent.replay": 100_000,
    "agent.save_replay": False,
}
OURS: dict[str, dict[str, Any]] = {
    "trpo": {
        "env.num": 8,
        "agent.rollout": 256,
        "agent.minibatches": 16,
        "agent.normalize_observation": False,
        "agent.normalize_reward": False,
    },
    "ars": {"env.num": 16, "agent.normalize_observation": False},  # ARS-V1: 8 directions, an episode forwards and back
    "tqc": REPLAY,
    "qr_dqn": REPLAY
    | {
        "agent.atoms": 50,
        "agent.updates_per_step": 1.0,
        "agent.target_every": 500,
        "agent.max_grad_norm": 0.0,
        "agent.epsilon_schedule": "constant",  # a random action costs contrib no forward pass
        "agent.epsilon_start": 0.05,
    },
}
STEPS = 100_000_000  # more than a round can reach
WARM_UP = 3.0  # seconds from the first update on, before the measurement


class Enough(Exception):
    """Raised by a hook to end a run."""


def ludus_rate(job: str, meter: Meter, seed: int) -> float:
    """Return the steps per second of Ludus."""
    import ludus

    def watch(values: Any) -> None:
        step = int(values["step"])
        if step > OURS[job].get("agent.warmup", 0) and meter.update(step):  # from the first update on
            raise Enough

    common = {"evaluation.every": 0, "threads": 1, "compile": "off", "quiet": True, "checkpoint_every": 0}
    with tempfile.TemporaryDirectory(prefix="ludus-") as runs:
        settings = OURS[job] | common | {"runs": runs}
        try:
            ludus.train(
                ENVIRONMENT[job], job, nb_step=STEPS, seed=seed, preset="none", settings=settings, on_update=watch
            )
        except Enough:
            return meter.rate
    raise RuntimeError("The run ended before the time did.")


def contrib_rate(job: str, meter: Meter, seed: int) -> float:
    """Return the steps per second of sb3-contrib."""
    import torch
    from sb3_contrib import ARS, QRDQN, TQC, TRPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure

    from benchmarks.peers import NativeCartPole, Watch

    class Until(Watch):
        """Raises when done, since ARS goes on if ``_on_step`` returns False; begins with the first update."""

        def _on_rollout_start(self) -> None:
            if self.num_timesteps > OURS[job].get("agent.warmup", 0):
                super()._on_rollout_start()

        def _on_step(self) -> bool:
            if self._enough:
                raise Enough
            return True

    torch.set_num_threads(1)
    # ARS plays one candidate after the other; of several environments it would count all steps and use those of one
    rows = 1 if job == "ars" else OURS[job]["env.num"]
    plain = {"disable_env_checker": True}
    native = job in ("trpo", "qr_dqn")
    env = NativeCartPole(rows, seed) if native else make_vec_env(ENVIRONMENT[job], rows, seed=seed, env_kwargs=plain)
    wide = {"net_arch": [256, 256], "activation_fn": torch.nn.ReLU}
    replayed: dict[str, Any] = {"batch_size": 256, "learning_starts": 1_000, "buffer_size": 100_000}
    models: dict[str, Any] = {
        "trpo": lambda: TRPO("MlpPolicy", env, n_steps=256, batch_size=128, seed=seed, device="cpu"),
        "ars": lambda: ARS("LinearPolicy", env, n_delta=8, delta_std=0.05, seed=seed, device="cpu"),
        "tqc": lambda: TQC("MlpPolicy", env, policy_kwargs=wide, seed=seed, device="cpu", **replayed),
        "qr_dqn": lambda: QRDQN(
            "MlpPolicy",
            env,
            policy_kwargs=wide | {"n_quantiles": 50},
            learning_rate=5e-4,
            train_freq=1,
            target_update_interval=500,
            exploration_initial_eps=0.05,
            exploration_final_eps=0.05,
            seed=seed,
            device="cpu",
            **replayed,
        ),
    }
    model = models[job]()
    model.set_logger(configure(tempfile.mkdtemp(prefix="sb3-"), ["json", "tensorboard"]))
    try:
        model.learn(STEPS, callback=Until(meter))
    except Enough:
        return meter.rate
    raise RuntimeError("The run ended before the time did.")


def run_round(job: str, side: str, seed: int, seconds: float) -> float:
    """Run one round in a new process; return steps per second."""
    command = [sys.executable, "-m", "benchmarks.contrib", job, "--side", side]
    command += ["--seed", str(seed), "--seconds", str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rate = float(json.loads(done.stdout.splitlines()[-1])["rate"])
    print(f"  {job} {side}: {rate:,.0f} steps/s", flush=True)
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description="Ludus against sb3-contrib.")
    parser.add_argument("jobs", nargs="*", choices=[*ENVIRONMENT, []], help="default: all")
    parser.add_argument("--side", choices=["ludus", "contrib"], help="run one round of this side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each round is measured")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.side:
        (job,) = args.jobs
        play = ludus_rate if args.side == "ludus" else contrib_rate
        emit(job=job, side=args.side, rate=play(job, Meter(WARM_UP, args.seconds, at_first_update=True), args.seed))
        return
    for job in args.jobs or ENVIRONMENT:
        ratios = []
        for seed in range(args.rounds):
            sides = ("ludus", "contrib") if seed % 2 == 0 else ("contrib", "ludus")
            rate = {side: run_round(job, side, seed, args.seconds) for side in sides}
            ratios.append(rate["ludus"] / rate["contrib"])
        low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
        met = "met" if median >= TARGETS[job] else "missed"
        print(
            f"{job}: {median:.2f} ({low:.2f} to {high:.2f}) times sb3-contrib's steps per second, target "
            f"{TARGETS[job]:g}: {met}",
            flush=True,
        )


if __name__ == "__main__":
    main()
