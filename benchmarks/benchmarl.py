"""One round of BenchMARL's MAPPO for ``benchmarks.multiagent``, run by an interpreter that has it, and shared settings.

Only the standard library is imported outside of functions.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import suppress
from typing import Any

from benchmarks.protocol import Meter, emit

PEER = "benchmarl"
ENVIRONMENTS, ROLLOUT, EPOCHS, MINIBATCHES, HIDDEN = 8, 128, 4, 4, (64, 64)
WORLD: dict[str, Any] = {"N": 3, "local_ratio": 0.5, "max_cycles": 25, "continuous_actions": False}
LEARNING_RATE, GAMMA, GAE_LAMBDA, CLIP, MAX_GRAD_NORM = 7e-4, 0.95, 0.95, 0.2, 0.5
STEPS = 100_000_000  # more than a round can reach


class Enough(Exception):
    """Raised by a callback to end a run."""


def make_world(task: Any, num_envs: int, continuous_actions: bool, seed: int | None, device: Any) -> Any:
    """Return a function that makes mpe2's simple_spread; BenchMARL has it from older versions of PettingZoo."""
    import mpe2.simple_spread_v3
    from torchrl.envs import PettingZooWrapper

    return lambda: PettingZooWrapper(
        mpe2.simple_spread_v3.parallel_env(**WORLD), return_state=True, categorical_actions=True, seed=seed
    )


def make_task() -> Any:
    """Return BenchMARL's task, which it pickles, with the worlds above."""
    from benchmarl.environments.pettingzoo.common import PettingZooClass

    PettingZooClass.get_env_fun = make_world
    return PettingZooClass(name="SIMPLE_SPREAD", config=WORLD)


def play(warm_up: float, seconds: float, seed: int, steps: int) -> dict[str, float]:
    """Train for some seconds, or ``steps``; return steps per second and the mean return of the last episodes."""
    import torch
    from benchmarl.algorithms import MappoConfig
    from benchmarl.experiment import Callback, Experiment, ExperimentConfig
    from benchmarl.models.mlp import MlpConfig

    torch.set_num_threads(1)
    meter, found = Meter(warm_up, seconds), {"return": 0.0}

    class Watch(Callback):  # type: ignore[misc]
        def on_batch_collected(self, batch: Any) -> None:
            done = batch[("next", "done")].squeeze(-1)
            returns = batch[("next", "agent", "episode_reward")].squeeze(-1).mean(-1)
            if done.any():
                found["return"] = float(returns[done].mean())
            enough = meter.update(self.experiment.total_frames)
            if (enough and not steps) or (steps and self.experiment.total_frames >= steps):
                raise Enough

    config = ExperimentConfig.get_from_yaml()
    batch = ENVIRONMENTS * ROLLOUT
    for name, value in {
        "max_n_frames": STEPS,
        "on_policy_collected_frames_per_batch": batch,
        "on_policy_n_envs_per_worker": ENVIRONMENTS,
        "on_policy_n_minibatch_iters": EPOCHS,
        "on_policy_minibatch_size": batch // MINIBATCHES,
        "lr": LEARNING_RATE,
        "gamma": GAMMA,
        "clip_grad_val": MAX_GRAD_NORM,
        "prefer_continuous_actions": False,
        "evaluation": False,
        "render": False,
        "loggers": [],
        "create_json": False,
        "save_folder": tempfile.mkdtemp(prefix="benchmarl-"),
    }.items():
        setattr(config, name, value)
    algorithm = MappoConfig.get_from_yaml()
    algorithm.clip_epsilon, algorithm.lmbda = CLIP, GAE_LAMBDA
    network = MlpConfig(num_cells=list(HIDDEN), layer_class=torch.nn.Linear, activation_class=torch.nn.Tanh)
    experiment = Experiment(
        task=make_task(),
        algorithm_config=algorithm,
        model_config=network,
        critic_model_config=network,
        seed=seed,
        config=config,
    )
    experiment.callbacks = [watch := Watch()]  # not in the constructor, which pickles them
    watch.experiment = experiment
    with suppress(Enough):
        experiment.run()
    return {"rate": meter.rate, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description="One round of BenchMARL's MAPPO.")
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead of seconds")
    args = parser.parse_args()
    emit(side=PEER, **play(args.warm_up, args.seconds, args.seed, args.steps))


if __name__ == "__main__":
    main()
