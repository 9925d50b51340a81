"""What acting saw is what learning replays: ratios of 1 before the first step, for every kind of policy and network."""

from __future__ import annotations

from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from agents_setup import make_worker
from gymnasium import spaces

from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch

TOY = "ludus.environments.toy:"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "discrete": ("CartPole-v1", {}),
    "memory": (TOY + "MemoryEnv", {}),
    "masked": (TOY + "MaskedEnv", {}),
    "masked by info": (TOY + "MaskedEnv", {"env__options": ("in_info=true",)}),
    "mixed": (TOY + "MixedActionEnv", {"env__options": ("more=true",)}),
    "gaussian": (TOY + "TargetEnv", {}),
    "tanh": (TOY + "TargetEnv", {"agent__distribution": "tanh"}),
    "beta": (TOY + "TargetEnv", {"agent__distribution": "beta"}),
}


class Switches(gymnasium.Env[Any, Any]):
    """Six switches of which some are stuck; the observation shows which to turn on, and info which may be."""

    def __init__(self, pairs: bool = False) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 1, (6,), np.float32), spaces.MultiBinary(6)
        self.pairs, self.count = pairs, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.draw()

    def draw(self) -> tuple[Any, dict[str, Any]]:
        self.allowed = self.np_random.random((6, 2)) < 0.7
        self.allowed[:, 0] |= ~self.allowed[:, 1]
        if not self.pairs:
            self.allowed[:, 0] = True
        self.wanted = self.np_random.integers(0, 2, 6)
        return self.wanted.astype(np.float32), {"action_mask": self.allowed if self.pairs else self.allowed[:, 1]}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.allowed[np.arange(6), action].all()
        self.count += 1
        reward = float((action == self.wanted).mean())
        observation, info = self.draw()
        return observation, reward, self.count >= 7, False, info


KINDS |= {
    "masked bits": (f"{__name__}:Switches", {}),
    "masked pairs of bits": (f"{__name__}:Switches", {"env__options": ("pairs=true",)}),
}
NETWORKS: dict[str, dict[str, Any]] = {
    "separate": {},
    "shared": {"network__shared": "yes"},
    "lstm": {"network__body": "lstm"},
    "shared lstm": {"network__body": "lstm", "network__shared": "yes"},
    "lstm source": {"network__net1d": "lstm"},
    "normalized": {"agent__normalize_observation": True, "agent__normalize_reward": True},
    "normalized lstm": {"network__body": "lstm", "agent__normalize_observation": True},
}


CHOICES = [
    pytest.param(*names, marks=[pytest.mark.slow] if (i + j + k) % 2 else [], id="-".join(names))
    for (i, j, k), names in zip(
        product(range(len(KINDS)), range(len(NETWORKS)), range(2)),
        product(KINDS, NETWORKS, ["ppo", "a2c"]),
        strict=True,
    )
]  # every pair of kind, network and agent is among the fast ones


@pytest.mark.parametrize(("kind", "network", "agent"), CHOICES)
def test_ratios_are_one_before_the_first_step_and_training_goes_on(kind: str, network: str, agent: str) -> None:
    environment, changes = KINDS[kind]
    worker = make_worker(environment, agent, **NETWORKS[network], **changes)
    try:
        begin(worker, 3)
        for _ in range(3):  # the second and third rollout start in the middle of episodes, with moved normalizers
            collect(worker)
            batch = worker.cache.read()
            assert_replayed(worker.agent, batch)
            learned = worker.agent.learn(batch, worker.updater)
            assert all(torch.isfinite(x) for x in learned.metrics.values())
        worker.evaluator.run(worker.agent, worker.device)
    finally:
        worker.close()


def assert_replayed(agent: Any, batch: Batch) -> None:
    rows = batch.without_last_observation()
    with torch.no_grad():
        terms, value = agent.evaluate(rows)
        learned_from = agent._values(batch)[:-1]
    ratio = (terms["log_prob"] - batch.experience["log_prob"]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    torch.testing.assert_close(value, learned_from, rtol=1e-4, atol=1e-5)


def test_the_numpy_engine_acts_as_torch_does() -> None:
    """Same observation, same noise: same action, log-probability and value, before and after a learning."""
    for environment in ("CartPole-v1", TOY + "TargetEnv"):
        for network in ("separate", "shared", "normalized"):
            worker = make_worker(environment, **NETWORKS[network])
            begin(worker, 0)
            assert worker.agent.use_numpy()  # type: ignore[operator]
            for _ in range(2):
                assert_engines_agree(worker)
                collect(worker)
                worker.agent.learn(worker.cache.read(), worker.updater)
            worker.close()


def assert_engines_agree(worker: Any) -> None:
    agent = worker.agent
    for noise in (worker.seat.noise.next(), None):
        by_numpy = agent.act(worker.seat.env_step, worker.seat.hidden_state, noise)
        engine, agent._numpy = agent._numpy, None
        by_torch = agent.act(worker.seat.env_step, worker.seat.hidden_state, noise)
        agent._numpy = engine
        torch.testing.assert_close(by_numpy.action, by_torch.action, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(by_numpy.experience, by_torch.experience, rtol=1e-5, atol=1e-6)


def test_the_numpy_engine_leaves_what_it_does_not_know_to_torch() -> None:
    for environment, changes in (
        (TOY + "MaskedEnv", {}),
        (TOY + "MixedActionEnv", {}),
        (TOY + "TargetEnv", {"agent__distribution": "beta"}),
        ("CartPole-v1", {"network__body": "lstm"}),
        ("CartPole-v1", {"network__activation": "elu"}),
    ):
        worker = make_worker(environment, **changes)
        assert not worker.agent.use_numpy()  # type: ignore[operator]
        worker.close()
