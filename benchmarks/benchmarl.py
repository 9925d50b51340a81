"""One round of BenchMARL for ``benchmarks.multiagent``, run by an interpreter that has it, and shared settings.

Only the standard library is imported outside of functions.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from contextlib import suppress
from typing import Any

from benchmarks.protocol import Meter, emit

PEER = "benchmarl"
AGENTS = ("mappo", "maddpg", "qmix")
WORLDS: dict[str, dict[str, Any]] = {
    "simple_spread_v3": {"N": 3, "local_ratio": 0.5},
    "simple_speaker_listener_v4": {},
}
EPISODES = 1000  # greedy ones after training; means of 100 differ by more than 1 on speaker and listener
ENVIRONMENTS, HIDDEN, GAMMA, ADAM_EPS = 8, (64, 64), 0.95, 1e-6
LEARNING_RATE = {"mappo": 1e-3, "maddpg": 1e-3, "qmix": 5e-4}
ACTIVATION = {"mappo": "tanh", "maddpg": "relu", "qmix": "tanh"}
MAX_GRAD_NORM = {"mappo": 0.5, "maddpg": 0.5, "qmix": 10.0}
# MAPPO
ROLLOUT, EPOCHS, MINIBATCHES, GAE_LAMBDA, CLIP = 50, 8, 4, 0.95, 0.2
# MADDPG and QMIX
REPLAY, WARM_UP, MIXING = 100_000, 1_000, 32
BATCH = {"maddpg": 512, "qmix": 128}
UPDATES_PER_STEP = {"maddpg": 0.1, "qmix": 0.25}
TAU, TARGET_EVERY = 0.01, 200  # of MADDPG, whose targets are averages, and of QMIX, whose targets are copies
COLLECTED = 80  # steps between updates of BenchMARL, of all worlds
EXPLORATION = {"maddpg": (0.5, 0.05), "qmix": (1.0, 0.05)}  # σ of actions in [0, 1], and ε: at first, and at its end
EXPLORATION_SHARE = 1 / 3  # of the run, after which the end is reached
STEPS = 100_000_000  # more than a timed round can reach


class Enough(Exception):
    """Raised by a callback to end a run."""


def world_options(world: str, agent: str) -> dict[str, Any]:
    """Return the arguments of a world; BenchMARL's MADDPG has continuous actions only, and QMIX discrete ones."""
    return WORLDS[world] | {"max_cycles": 25, "continuous_actions": agent == "maddpg"}


def make_world(world: str, options: dict[str, Any], seed: int) -> Any:
    """Make a world of mpe2; BenchMARL has them from older versions of PettingZoo."""
    from importlib import import_module

    from torchrl.envs import PettingZooWrapper

    env = import_module(f"mpe2.{world}").parallel_env(**options)
    return PettingZooWrapper(env, return_state=True, categorical_actions=True, seed=seed)


def make_task(world: str, options: dict[str, Any], seed: int) -> Any:
    """Return BenchMARL's task, which it pickles, with worlds of mpe2, each with a seed of its own."""
    from benchmarl.environments.pettingzoo.common import PettingZooClass

    seeds = itertools.count(1_000 * seed)
    PettingZooClass.get_env_fun = lambda *_, **__: lambda: make_world(world, options, next(seeds))
    return PettingZooClass(name=world.rpartition("_")[0].upper(), config=options)


def make_experiment(agent: str, world: str, seed: int, steps: int) -> Any:
    """Return BenchMARL's experiment of so many steps, with the settings above."""
    import torch
    from benchmarl import algorithms
    from benchmarl.experiment import Experiment, ExperimentConfig
    from benchmarl.models.mlp import MlpConfig

    config, rollout = ExperimentConfig.get_from_yaml(), ENVIRONMENTS * ROLLOUT
    start, end = EXPLORATION.get(agent, (0.0, 0.0))
    for name, value in {
        "max_n_frames": steps,
        "on_policy_collected_frames_per_batch": rollout,
        "on_policy_n_envs_per_worker": ENVIRONMENTS,
        "on_policy_n_minibatch_iters": EPOCHS,
        "on_policy_minibatch_size": rollout // MINIBATCHES,
        "off_policy_collected_frames_per_batch": COLLECTED,
        "off_policy_n_envs_per_worker": ENVIRONMENTS,
        "off_policy_n_optimizer_steps": round(COLLECTED * UPDATES_PER_STEP.get(agent, 0)),
        "off_policy_train_batch_size": BATCH.get(agent, 1),
        "off_policy_memory_size": REPLAY,
        "off_policy_init_random_frames": WARM_UP,
        "exploration_eps_init": start,
        "exploration_eps_end": end,
        "exploration_anneal_frames": round(steps * EXPLORATION_SHARE),
        "soft_target_update": agent != "qmix",
        "polyak_tau": TAU,
        "hard_target_update_frequency": TARGET_EVERY,
        "lr": LEARNING_RATE[agent],
        "gamma": GAMMA,
        "adam_eps": ADAM_EPS,
        "clip_grad_val": MAX_GRAD_NORM[agent],
        "prefer_continuous_actions": agent == "maddpg",
        "evaluation": False,
        "render": False,
        "loggers": [],
        "create_json": False,
        "save_folder": tempfile.mkdtemp(prefix="benchmarl-"),
    }.items():
        setattr(config, name, value)
    algorithm = getattr(algorithms, f"{agent.capitalize()}Config").get_from_yaml()
    for name, value in {"clip_epsilon": CLIP, "lmbda": GAE_LAMBDA, "mixing_embed_dim": MIXING}.items():
        if hasattr(algorithm, name):
            setattr(algorithm, name, value)
    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[ACTIVATION[agent]]
    network = MlpConfig(num_cells=list(HIDDEN), layer_class=torch.nn.Linear, activation_class=activation)
    return Experiment(
        task=make_task(world, world_options(world, agent), seed),
        algorithm_config=algorithm,
        model_config=network,
        critic_model_config=network,
        seed=seed,
        config=config,
    )


def mean_over_agents(experiment: Any, batch: Any, name: str) -> Any:
    """Return the mean over the agents of all groups of a reward or return ``[...]``."""
    import torch

    return torch.cat([batch["next", group, name] for group in experiment.group_map], -2).mean((-2, -1))


def measure_rate(experiment: Any, warm_up: float, seconds: float) -> dict[str, float]:
    """Train for some seconds; return steps per second and the mean return of the last episodes."""
    from benchmarl.experiment import Callback

    meter, found = Meter(warm_up, seconds), {"return": 0.0}

    class Watch(Callback):  # type: ignore[misc]
        def on_batch_collected(self, batch: Any) -> None:
            done = batch["next", "done"].squeeze(-1)
            if done.any():
                found["return"] = float(mean_over_agents(experiment, batch, "episode_reward")[done].mean())
            if meter.update(experiment.total_frames):
                raise Enough

    experiment.callbacks = [watch := Watch()]  # not in the constructor, which pickles them
    watch.experiment = experiment
    with suppress(Enough):
        experiment.run()
    return {"rate": meter.rate, **found}


def measure_return(experiment: Any, agent: str, world: str, seed: int) -> dict[str, float]:
    """Train to the end; return the mean return of greedy episodes and the CPU time of this process in seconds."""
    import torch
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    experiment.run()
    options = world_options(world, agent)
    env = make_world(world, options, 1_000_000 + seed)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        played = [env.rollout(options["max_cycles"], policy=experiment.policy) for _ in range(EPISODES)]
    returns = [float(mean_over_agents(experiment, episode, "reward").sum()) for episode in played]
    return {"return": sum(returns) / EPISODES, "cpu": time.process_time(), "steps": experiment.total_frames}


def arguments(description: str) -> argparse.ArgumentParser:
    """Return the parser of a round, the same for both sides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--agent", choices=AGENTS, default=AGENTS[0])
    parser.add_argument("--world", choices=list(WORLDS), default=next(iter(WORLDS)))
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead of seconds")
    return parser


def main() -> None:
    args = arguments("One round of BenchMARL.").parse_args()
    from importlib.metadata import version

    import torch

    torch.set_num_threads(1)
    experiment = make_experiment(args.agent, args.world, args.seed, args.steps or STEPS)
    if args.steps:
        result = measure_return(experiment, args.agent, args.world, args.seed)
    else:
        result = measure_rate(experiment, args.warm_up, args.seconds)
    versions = {name: version(name) for name in ("benchmarl", "torchrl", "torch", "mpe2")}
    emit(side=PEER, seed=args.seed, versions=versions, **result)


if __name__ == "__main__":
    main()
