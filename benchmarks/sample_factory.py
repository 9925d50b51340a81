"""One round of Sample Factory's APPO for ``benchmarks.impala``, run by an interpreter that has it, and shared settings.

Only the standard library is imported outside of functions.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from benchmarks.protocol import Meter, emit

PEER = "sample factory"
WORKERS, ENVIRONMENTS = 2, 8  # environments of each worker
ROLLOUT, EPOCHS, MINIBATCHES, HIDDEN = 64, 4, 4, (64, 64)
BATCH = WORKERS * ENVIRONMENTS * ROLLOUT
OPTIONS: dict[str, Any] = {
    "env": "CartPole-v1",
    "device": "cpu",
    "num_workers": WORKERS,
    "num_envs_per_worker": ENVIRONMENTS,
    "rollout": ROLLOUT,
    "batch_size": BATCH // MINIBATCHES,
    "num_batches_per_epoch": MINIBATCHES,
    "num_epochs": EPOCHS,
    "with_vtrace": False,  # the default; with V-trace, 2.1.1 ends with an AttributeError in its summaries
    "use_rnn": False,
    "nonlinearity": "tanh",
    "actor_critic_share_weights": True,
    "normalize_input": False,
    "normalize_returns": False,
    "learning_rate": 2.5e-4,
    "ppo_clip_ratio": 0.2,
    "exploration_loss_coeff": 0.01,
    "value_loss_coeff": 0.5,
    "max_grad_norm": 0.5,
    "save_every_sec": 1_000_000,
    "save_best_every_sec": 1_000_000,
    "train_for_env_steps": 1_000_000_000,
}


def make_environment(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    """Make one environment, as Ludus does."""
    import gymnasium

    return gymnasium.make(name, render_mode=render_mode, disable_env_checker=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A round of Sample Factory's APPO.")
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds after the first update")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # of torch in every process, as in Ludus; it is faster than the default, all cores
    )

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

    register_env(OPTIONS["env"], make_environment)
    words = [f"--{name}={value}" for name, value in OPTIONS.items()]
    words += ["--encoder_mlp_layers", *map(str, HIDDEN), f"--seed={args.seed}"]
    words += [f"--train_dir={tempfile.mkdtemp(prefix='sample-factory-')}", "--experiment=round"]
    settings, _ = parse_sf_args(words)
    settings = parse_full_cfg(settings, words)
    settings, runner = make_runner(settings)
    runner.register_observer(Watch())
    if runner.init() == 0:
        runner.run()
    rewards = runner.policy_avg_stats.get("reward", [[]])[0]
    emit(
        side=PEER,
        rate=meter.rate,
        version=version("sample-factory"),
        torch=version("torch"),
        gymnasium=version("gymnasium"),
        **{"return": float(sum(rewards)) / max(len(rewards), 1)},
    )


if __name__ == "__main__":
    main()
