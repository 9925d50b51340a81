"""What Ludus must learn, as data, and the one way to run it, for tests and ``benchmarks/learning.py`` alike."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium

import ludus

AGENTS = ("ppo", "a2c")


@dataclass(frozen=True)
class Task:
    """An environment, what learns it, and the mean return of 100 fresh greedy episodes that it must reach."""

    name: str
    environment: str
    agent: str
    target: float
    nb_step: int
    seeds: int
    settings: Mapping[str, Any] = field(default_factory=dict)  # over the preset that fits environment and agent
    every: int = 5_000  # steps between evaluations
    whole: bool = False  # goes on to nb_step when the target is reached, so that the final policy is measured too
    beyond: bool = False  # what no such policy can do: every evaluation must stay below the target
    needs: str = ""  # a package that is no dependency of ours


class Outcome(NamedTuple):
    """What came of one seed."""

    reached: int | None  # steps at the first evaluation on target
    best: float
    final: float  # the last evaluation: the first on target, unless the task goes on
    steps: int
    seconds: float

    def passes(self, task: Task) -> bool:
        """Whether the task's demand was met."""
        return (self.reached is None) == task.beyond


def run(task: Task, seed: int, runs: Path) -> Outcome:
    """Train one seed on one thread."""
    began = time.perf_counter()
    settings = settings_of(task, runs)
    result = ludus.train(task.environment, task.agent, nb_step=task.nb_step, seed=seed, settings=settings)
    curve = evaluations(result.run)
    reached = next((step for step, mean in curve if mean >= task.target), None)
    best = max(mean for _, mean in curve)
    return Outcome(reached, best, curve[-1][1], result.steps, time.perf_counter() - began)


def run_quickly(task: Task, runs: Path) -> Outcome:
    """Train one seed, which ends at the first thousand of steps on target: an evaluation costs less than training."""
    return run(replace(task, every=1_000), 0, runs)


def settings_of(task: Task, runs: Path) -> dict[str, Any]:
    """The task's settings and those of the protocol."""
    protocol: dict[str, Any] = {
        "runs": str(runs),
        "quiet": True,
        "threads": 1,
        "checkpoint_every": 0,
        "evaluation.every": task.every,
        "evaluation.episodes": 100,
        "evaluation.environments": 100,
        "evaluation.greedy": True,
    }
    if not task.whole:
        protocol["evaluation.stop_at"] = task.target
    return protocol | dict(task.settings)


def evaluations(run: Path) -> list[tuple[int, float]]:
    """Steps and mean return of every evaluation of a run."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["evaluation/mean"]) for line in lines if "evaluation/mean" in line]


TOY = "ludus.environments.toy:"
IMAGE_TOY = "ludus.environments.image_toy:"
UNWATCHED: dict[str, Any] = {  # a run of which only the last evaluation counts
    "quiet": True,
    "threads": 1,
    "compile": "off",
    "evaluation.every": 0,
    "evaluation.episodes": 100,
    "evaluation.environments": 100,
    "checkpoint_every": 0,
    "log_every": 0,
}
BLIND_CARTPOLE = f"{TOY}NoVelocityCartPole"
LSTM = {"network.body": "lstm"}
UNSCALED = {"agent.normalize_observation": False, "agent.normalize_reward": False}
SMALL = {"agent.gamma": 0.9, "network.hidden": (32, 32), "network.lstm_size": 32}
QUICK: dict[str, dict[str, Any]] = {
    "ppo": SMALL | UNSCALED | {"agent.rollout": 32, "agent.epochs": 8, "agent.learning_rate": 2e-3},
    "a2c": SMALL
    | UNSCALED
    | {
        "agent.rollout": 8,
        "agent.learning_rate": 5e-3,
        "agent.learning_rate_schedule": "constant",
        "agent.optimizer": "adam",
        "agent.normalize_advantage": True,
        "agent.log_std_init": -1.0,  # at a deviation of 1, clipping makes a mean beyond the target the best one
    },
}
QUICK["vtrace"] = QUICK["a2c"]
QUICK["trpo"] = SMALL | UNSCALED | {"agent.rollout": 32, "agent.minibatches": 2, "agent.cg_damping": 0.01}
QUICK["trpo"] |= {"agent.log_std_init": -1.0, "agent.target_kl": 0.02, "agent.cg_iterations": 5}
QUICK["reinforce"] = SMALL | UNSCALED | {"agent.learning_rate": 1e-2, "agent.log_std_init": -1.0}
QUICK["ars"] = {"env.num": 16, "agent.learning_rate": 0.1, "agent.perturbation": 0.2}
QUICK["pqn"] = SMALL | {"agent.rollout": 16, "agent.learning_rate": 2e-3, "agent.epsilon_share": 0.3}

CLASSIC = (
    Task("cartpole/ppo", "CartPole-v1", "ppo", 475, 100_000, 10),
    Task("cartpole/a2c", "CartPole-v1", "a2c", 475, 500_000, 10),
    Task("novelocity/lstm", BLIND_CARTPOLE, "ppo", 475, 200_000, 5),
    Task("novelocity/feedforward", BLIND_CARTPOLE, "ppo", 100, 200_000, 3, {"network.body": "identity1d"}, beyond=True),
    Task("pendulum/gaussian", "Pendulum-v1", "ppo", -200, 100_000, 5, every=10_000),
    Task("pendulum/beta", "Pendulum-v1", "ppo", -200, 100_000, 5, {"agent.distribution": "beta"}, every=10_000),
    Task("acrobot/ppo", "Acrobot-v1", "ppo", -100, 200_000, 5, every=20_000),
    Task("catch/ppo", f"{IMAGE_TOY}CatchEnv", "ppo", 4.5, 40_000, 5),  # of 5; untrained: −2
    # of 16; one question alone: 12; of seeds 0 to 2, one stays at 14 up to 250,000 steps
    Task("question/ppo", f"{IMAGE_TOY}QuestionEnv", "ppo", 13.5, 250_000, 3, every=10_000),
    Task("lunarlander/ppo", "LunarLander-v3", "ppo", 200, 1_000_000, 5, every=50_000, whole=True),
    # At these numbers of steps RL Zoo has 500, −83, −175 and 262 (LunarLanderContinuous-v2) with TRPO; 500, −83, −213
    # with ARS. The targets on Acrobot and of TRPO on Pendulum are a standard error of 100 episodes below.
    Task("cartpole/trpo", "CartPole-v1", "trpo", 500, 100_000, 5),
    Task("acrobot/trpo", "Acrobot-v1", "trpo", -85, 100_000, 5, every=10_000),
    Task("pendulum/trpo", "Pendulum-v1", "trpo", -185, 100_000, 5, every=10_000),
    Task("cartpole/reinforce", "CartPole-v1", "reinforce", 475, 200_000, 5, every=10_000),
    Task("cartpole/ars", "CartPole-v1", "ars", 500, 50_000, 5),
    Task("acrobot/ars", "Acrobot-v1", "ars", -85, 500_000, 5, every=20_000),
    Task("pendulum/ars", "Pendulum-v1", "ars", -213, 2_000_000, 5, every=100_000),
    Task("cartpole/pqn", "CartPole-v1", "pqn", 475, 500_000, 5, every=20_000),
    Task("acrobot/pqn", "Acrobot-v1", "pqn", -100, 500_000, 5, every=20_000),
    Task("pendulum/reinforce", "Pendulum-v1", "reinforce", -200, 500_000, 5, every=50_000, whole=True),
    Task("acrobot/reinforce", "Acrobot-v1", "reinforce", -100, 500_000, 5, every=20_000),
    Task("lunarlandercontinuous/trpo", "LunarLanderContinuous-v3", "trpo", 262, 200_000, 5, every=20_000, whole=True),
    Task("lunarlandercontinuous/reinforce", "LunarLanderContinuous-v3", "reinforce", 200, 2_000_000, 5, every=100_000),
)

# MinAtar's Breakout, each cell as 4×4 pixels, since nature_cnn needs 36×36
BREAKOUT: dict[str, Any] = {
    "preprocess.observation": ('resize(height=40, width=40, method="nearest")',),
    "network.shared": "yes",
    "env.num": 16,
    "agent.rollout": 64,
    "agent.epochs": 3,
    "agent.learning_rate": 1e-3,
    "agent.entropy_coef": 0.01,
}
IMAGES = tuple(
    Task(
        f"breakout/{piece}",
        "benchmarks.off_policy_minatar:Breakout",
        "ppo",
        target,
        60_000,
        3,
        BREAKOUT | {"network.net3d": piece},
        every=20_000,
        whole=True,
        needs="minatar",
    )
    for piece, target in (("nature_cnn", 2.0), ("impala_cnn", 3.0))  # after 3,700 steps: 0.55, 0.05
)


def toy(name: str, environment: str, agent: str, target: float, nb_step: int, **more: Any) -> Task:
    """A task of seconds."""
    settings = QUICK[agent] | more.pop("settings", {})
    return Task(f"{name}/{agent}", TOY + environment, agent, target, nb_step, 3, settings, every=2_000, **more)


def toys(agent: str) -> tuple[Task, ...]:
    """One task for each thing that an agent must master."""
    info, dials = ({"env.options": (f"{option}=true",)} for option in ("in_info", "more"))
    continuous = [
        toy(kind, "TargetEnv", agent, -0.3, 16_000, settings={"agent.distribution": kind})  # of 0; untrained: −2.7
        for kind in ("gaussian", "tanh", "beta")
    ]
    return (
        toy("memory", "MemoryEnv", agent, 0.95, 10_000, settings=LSTM),
        toy("memory-feedforward", "MemoryEnv", agent, 0.5, 10_000, beyond=True),  # its mean is 0, ± 0.1
        toy("masked", "MaskedEnv", agent, 7.8, 10_000),  # of 8
        toy("masked-by-info", "MaskedEnv", agent, 7.8, 10_000, settings=info),
        toy("mixed", "MixedActionEnv", agent, 7.2, 20_000),  # of 8; with amounts left at 0: 6
        toy("mixed-more", "MixedActionEnv", agent, 5.0, 40_000, settings=dials),  # of 8; one switch left to chance: 4
        *continuous,
    )


class SeededSpaces(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Seeds the space that SB3's identity environments draw their states from, so that a run can be repeated."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.env.action_space.seed(seed)
        return super().reset(seed=seed, options=options)


def identity(agent: str, kind: str, option: str, nb_step: int) -> Task:
    """One of Stable-Baselines3's identity environments by default settings, within the budget of its own tests."""
    settings = {"env.options": (option,), "env.wrappers": (SeededSpaces,)}
    environment = f"stable_baselines3.common.envs.identity_env:IdentityEnv{kind}"
    return Task(f"identity{kind.lower()}/{agent}", environment, agent, 90, nb_step, 5, settings)  # of 100


IDENTITY = tuple(
    identity(agent, *task)
    for agent, box in (("ppo", 3_000), ("a2c", 3_500))
    for task in (
        ("", "dim=4", 3_000),
        ("MultiDiscrete", "dim=4", 3_000),
        ("MultiBinary", "dim=4", 3_000),
        ("Box", "eps=0.5", box),
    )
)
GAUSSIAN = {"agent.distribution": "gaussian"}
MORE_TOYS = tuple(
    task
    for agent in ("vtrace", "trpo", "reinforce")
    for task in (
        toy("memory", "MemoryEnv", agent, 0.95, 10_000, settings=LSTM),
        toy("masked", "MaskedEnv", agent, 7.8, 10_000),
        toy("gaussian", "TargetEnv", agent, -0.3, 16_000, settings=GAUSSIAN),
    )
)
MORE_TOYS += (
    toy("masked", "MaskedEnv", "ars", 7.8, 40_000),
    toy("target", "TargetEnv", "ars", -0.3, 20_000),
    toy("masked", "MaskedEnv", "pqn", 7.8, 10_000),
    toy("memory", "MemoryEnv", "pqn", 0.95, 20_000, settings=LSTM),
)
TOYS = (*(task for agent in AGENTS for task in toys(agent)), *MORE_TOYS)
VALUES = ("dqn", "double_dqn", "dueling_dqn", "c51", "qr_dqn", "iqn", "munchausen_dqn", "rainbow")
ACTORS = ("ddpg", "hddpg", "td3", "sac", "tqc", "droq", "crossq")
REPLAYED = {"agent.warmup": 200, "agent.batch_size": 64, "agent.updates_per_step": 0.5}
FEED_FORWARD = (
    {key: value for key, value in SMALL.items() if "lstm" not in key} | {"agent.learning_rate": 2e-3} | REPLAYED
)
QUICK |= dict.fromkeys(VALUES, FEED_FORWARD | {"agent.target_every": 50})
QUICK |= dict.fromkeys(ACTORS, FEED_FORWARD | {"network.hidden": (64, 64), "network.activation": "relu"})
LIGHT = {"network.hidden": (32, 32), "agent.updates_per_step": 0.1}
QUICK |= {agent: QUICK[agent] | LIGHT for agent in ("tqc", "droq")}
QUICK["droq"] = QUICK["droq"] | {"agent.policy_delay": 1}
# each update of the actor also moves the running statistics that it acts by
QUICK["crossq"] = QUICK["crossq"] | {"agent.updates_per_step": 0.25, "agent.policy_delay": 1}
QUICK["crossq"] = QUICK["crossq"] | {"network.critic.hidden": (64, 64)}
QUICK["discrete_sac"] = FEED_FORWARD | {"agent.tau": 0.02, "agent.target_entropy": 0.5}
QUICK["r2d2"] = SMALL | REPLAYED
QUICK["r2d2"] |= {"agent.batch_size": 16, "agent.updates_per_step": 0.125, "agent.learning_rate": 2e-3}
UNROLLED = SMALL | {"agent.rollout": 16, "agent.optimizer": "adam", "agent.learning_rate": 2e-3, "agent.warmup": 500}
QUICK |= dict.fromkeys(("acer", "acer_vtrace"), UNROLLED)
OFF_POLICY_TOYS = (
    *(toy("masked", "MaskedEnv", agent, 7.8, 6_000) for agent in (*VALUES, "discrete_sac", "acer", "acer_vtrace")),
    *(toy("memory", "MemoryEnv", agent, 0.95, 10_000, settings=LSTM) for agent in ("r2d2", "acer", "acer_vtrace")),
    *(toy("target", "TargetEnv", agent, -0.3, 4_000) for agent in ACTORS),
)
OFF_POLICY = (
    *(
        Task(f"cartpole/{agent}", "CartPole-v1", agent, 475, 100_000, 5)
        for agent in ("dqn", "double_dqn", "qr_dqn", "iqn")
    ),
    *(
        Task(f"cartpole/{agent}", "CartPole-v1", agent, 475, 50_000, 5)
        for agent in ("dueling_dqn", "c51", "rainbow", "acer", "acer_vtrace", "discrete_sac")
    ),
    Task("novelocity/r2d2", BLIND_CARTPOLE, "r2d2", 475, 200_000, 5),
    *(
        Task(f"pendulum/{agent}", "Pendulum-v1", agent, -200, 20_000, 5)
        for agent in ("ddpg", "td3", "sac", "tqc", "crossq")
    ),
)
TASKS = {task.name: task for task in (*CLASSIC, *IMAGES, *OFF_POLICY, *TOYS, *IDENTITY, *OFF_POLICY_TOYS)}
