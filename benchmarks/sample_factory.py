"""One round of Sample Factory's APPO for ``benchmarks.impala``, run by an interpreter that has it, and shared settings.

Only the standard library is imported outside of functions.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from typing import Any

from benchmarks.protocol import Meter, emit

PEER = "sample factory"
WORKERS, ENVIRONMENTS = 2, 8  # environments of each worker


@dataclass(frozen=True)
class Job:
    """What both libraries train, and how."""

    environment: str
    target: float  # how many times faster Ludus must be, by the median
    clip: float
    warm_up: float  # seconds after the first update
    seconds: float  # how long a round is measured
    rollout: int = 64
    epochs: int = 4
    minibatches: int = 4

    @property
    def batch(self) -> int:
        """Transitions of one update."""
        return WORKERS * ENVIRONMENTS * self.rollout


JOBS = {
    "cartpole": Job("CartPole-v1", 1.5, clip=0.2, warm_up=8.0, seconds=10.0),
    "pong": Job("Pong-v5", 1.1, clip=0.1, warm_up=15.0, seconds=30.0),  # an update takes seconds
}
HIDDEN = (64, 64)  # of CartPole's network
PONG_THREADS = 1  # of each worker's EnvPool
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "num_workers": WORKERS,
    "with_vtrace": False,  # the default; with V-trace, 2.1.1 ends with an AttributeError in its summaries
    "use_rnn": False,
    "actor_critic_share_weights": True,
    "normalize_input": False,
    "normalize_returns": False,
    "learning_rate": 2.5e-4,
    "exploration_loss_coeff": 0.01,
    "value_loss_coeff": 0.5,
    "max_grad_norm": 0.5,
    "save_every_sec": 1_000_000,
    "save_best_every_sec": 1_000_000,
    "train_for_env_steps": 1_000_000_000,
}
OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "cartpole": {"num_envs_per_worker": ENVIRONMENTS, "nonlinearity": "tanh"},
    "pong": {
        "num_envs_per_worker": 1,  # a pool of several environments, which a worker steps as one batch
        "worker_num_splits": 1,
        "batched_sampling": True,
        "nonlinearity": "relu",
        "encoder_conv_architecture": "convnet_atari",
        "obs_scale": 255.0,
    },
}
LAYERS = {"cartpole": ["--encoder_mlp_layers", *map(str, HIDDEN)], "pong": ["--encoder_conv_mlp_layers", "512"]}


def make_cartpole(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    """Make one environment, as Ludus does."""
    import gymnasium

    return gymnasium.make(name, render_mode=render_mode, disable_env_checker=True)


def make_pong(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    """Make a pool of environments, as Ludus does, with resets in the same step, as Sample Factory needs them."""
    import envpool
    import gymnasium
    import numpy as np

    class Pool(gymnasium.Env):  # type: ignore[type-arg, unused-ignore]
        """Has one "agent" for each environment of an EnvPool."""

        num_agents, is_multiagent = ENVIRONMENTS, True

        def __init__(self) -> None:
            seed = 0 if env_config is None else env_config.env_id * ENVIRONMENTS
            self._pool = envpool.make_gymnasium(name, num_envs=ENVIRONMENTS, num_threads=PONG_THREADS, seed=seed)
            self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space

        def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
            return self._pool.reset()[0], {}

        def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
            observation, reward, terminated, truncated, _ = self._pool.step(np.asarray(actions, np.int32).reshape(-1))
            if (done := terminated | truncated).any():
                rows = np.flatnonzero(done).astype(np.int32)
                observation[rows] = self._pool.reset(rows)[0]
            return observation, reward.astype(np.float32), terminated, truncated, {}

        def close(self) -> None:
            del self._pool  # its close() needs a newer gymnasium

    return Pool()


MAKE = {"cartpole": make_cartpole, "pong": make_pong}


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a job."""
    job = JOBS[name]
    common = {
        "env": job.environment,
        "rollout": job.rollout,
        "batch_size": job.batch // job.minibatches,
        "num_batches_per_epoch": job.minibatches,
        "num_epochs": job.epochs,
        "ppo_clip_ratio": job.clip,
    }
    return OPTIONS | common | OWN_OPTIONS[name]


def main() -> None:
    parser = argparse.ArgumentParser(description="A round of Sample Factory's APPO.")
    parser.add_argument("job", choices=list(JOBS))
    parser.add_argument("--warm-up", type=float, required=True, help="seconds after the first update")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # of torch in every process, as in Ludus; it is faster than the default, all cores
    os.environ["OMP_NUM_THREADS"] = "1"

    from importlib.metadata import version

    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    meter = Meter(args.warm_up, args.seconds, at_first_update=True)

    class Watch(AlgoObserver):  # type: ignore[misc]
        """Measures steps after each training iteration, and ends the run."""

        def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
            if meter.update(runner.env_steps.get(0, 0)):
                runner.cfg.train_for_env_steps = -1

    register_env(JOBS[args.job].environment, MAKE[args.job])
    words = [f"--{name}={value}" for name, value in options_of(args.job).items()]
    words += [*LAYERS[args.job], f"--seed={args.seed}"]
    words += [f"--train_dir={tempfile.mkdtemp(prefix='sample-factory-')}", "--experiment=round"]
    settings, _ = parse_sf_args(words)
    settings = parse_full_cfg(settings, words)
    settings, runner = make_runner(settings)
    runner.register_observer(Watch())
    if runner.init() == 0:
        runner.run()
    rewards = runner.policy_avg_stats.get("reward", [[]])[0]
    names = ("sample-factory", "torch", "gymnasium", *(["envpool"] if args.job == "pong" else []))
    emit(
        side=PEER,
        rate=meter.rate,
        versions={name: version(name) for name in names},
        **{"return": float(sum(rewards)) / len(rewards) if rewards else None},
    )


if __name__ == "__main__":
    main()
