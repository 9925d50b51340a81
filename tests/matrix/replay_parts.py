"""The choices of agents that learn from a replay, and which of them go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matrix_parts import NETWORKS, OBSERVATIONS, Choice, common, environment_of

FIXED = {"agent.epsilon_schedule": "constant", "agent.epsilon_start": 0.3}
CHOOSING: dict[str, dict[str, Any]] = {  # agents for one Discrete action
    "dqn": {},
    "dqn by n steps": {
        "agent.n_step": 3,
        "agent.optimizer": "rmsprop",
        "agent.rescaled": True,
        "agent.normalize_observation": True,
    },
    "double_dqn by small steps": FIXED | {"agent.target_every": 1, "agent.tau": 0.1},
    "dueling_dqn": {"agent.epsilon_ladder": 3, "agent.epsilon_schedule": "exponential"},
    "c51": {"agent.dueling": True},
    "qr_dqn": {"agent.atoms": 5, "agent.double": True},
    "iqn": {"agent.dueling": True, "agent.noisy": True},
    "munchausen_dqn by n steps": {"agent.n_step": 2},
    "rainbow": {"agent.atoms": 7},
    "r2d2": {"agent.n_step": 2, "agent.normalize_observation": True},
    "discrete_cql": {"agent.values": "quantile", "agent.atoms": 3},
    "iql": {"agent.n_step": 2},
    "discrete_sac": {},
    "discrete_sac with one critic": {"agent.critics": 1, "agent.learn_alpha": False, "agent.n_step": 2},
    "acer": {"agent.normalize_observation": True, "agent.normalize_reward": True},
    "acer_vtrace": {"agent.trust_region": 0, "agent.optimizer": "adam"},
    "pqn": {"agent.normalize_observation": True},
}
STEERING: dict[str, dict[str, Any]] = {  # agents for bounded Boxes
    "ddpg": {"agent.noise": "ornstein_uhlenbeck"},
    "ddpg with noise on parameters": {"agent.noise": "parameter", "agent.critics": 2},
    "hddpg": {"agent.noise": "uniform", "agent.n_step": 2, "agent.normalize_observation": True},
    "td3": {"agent.noise": "clipped_normal", "agent.noise_sigma_end": 0.0},
    "td3_bc": {},
    "cql": {"agent.conservative_samples": 2},
    "sac": {},
    "sac with one critic": {"agent.critics": 1, "agent.learn_alpha": False, "agent.n_step": 3},
    "tqc": {"agent.quantiles": 5, "agent.n_step": 2},
    "tqc with one critic": {"agent.quantiles": 3, "agent.dropped_quantiles": 1, "agent.critics": 1},
    "droq": {"agent.updates_per_step": 1.0, "agent.policy_delay": 2},
    "crossq": {"network.critic.hidden": (8,), "agent.policy_delay": 2},
}
REMEMBERING = ("lstm body", "lstm source and body", "own network")
LEARNING = CHOOSING | STEERING


def factors(learning: dict[str, Any], actions: tuple[str, ...], backends: tuple[str, ...]) -> list[tuple[Any, ...]]:
    return [tuple(NETWORKS), tuple(OBSERVATIONS), actions, tuple(learning), backends, (False, True)]


CHOOSING_ACTIONS, STEERING_ACTIONS = ("discrete", "discrete masked"), ("tanh", "beta", "boxes")


def possible(choice: Choice) -> bool:
    """Whether these go together: not all agents learn a memory, share, or draw by priority."""
    network, _, _, learning, _, prioritized = choice
    agent, memory = learning.split()[0], network in REMEMBERING
    if agent.startswith("acer"):
        return not prioritized
    if agent == "pqn":
        return not prioritized and network != "shared"
    if agent in ("crossq", "cql", "iql", "discrete_cql") and memory:
        return False
    if network == "shared" or (agent == "r2d2") > memory:
        return False
    if agent in ("rainbow", "iqn"):  # noisy as they are here
        return network == "separate"
    return not (memory and agent in ("c51", "qr_dqn"))


def settings_of(choice: Choice, folder: Path) -> tuple[str, str, dict[str, Any]]:
    """Environment, agent and settings of a tiny run, in which the replay is filled more than once."""
    network, observation, action, learning, backend, prioritized = choice
    settings = common(observation, action, "subproc" if backend == "alternate" else backend, folder)
    if backend == "alternate":
        settings |= {"env.alternate": True, "env.workers": 2}
    if learning == "pqn":
        settings |= {"agent.rollout": 4, "agent.minibatches": 2, "agent.epochs": 1}
    elif learning.startswith("acer"):
        settings |= {"agent.rollout": 4, "agent.replay": 24, "agent.warmup": 4, "agent.replay_ratio": 2.0}
    else:
        settings |= {"agent.replay": 30, "agent.batch_size": 4, "agent.warmup": 6, "agent.updates_per_step": 0.2}
        settings |= {"agent.prioritized": prioritized}
        memory = network in REMEMBERING
        settings |= {"agent.sequence": 4 * memory, "agent.burn_in": 2 * memory, "agent.overlap": 2 * memory}
    settings |= NETWORKS[network] | LEARNING.get(learning, {})
    return environment_of(backend), learning.split()[0], settings
