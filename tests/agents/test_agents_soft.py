"""n-step returns of soft agents: the entropy bonus counts at every state that a return passes."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from actor_setup import make_worker
from torch import nn

from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch
from ludus.core.hidden_state import HiddenState
from ludus.networks.critic import ACTION

GAMMA, ALPHA = 0.9, 0.5
LSTM = {"network__body": "lstm", "agent__sequence": 6, "agent__burn_in": 2, "agent__overlap": 2}


class Chain(gymnasium.Env[Any, Any]):
    """Every step is worth 1, whatever is done; episodes are cut after 3 to 9 steps, and never end."""

    def __init__(self, choices: int = 4) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        two = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(choices) if choices else two

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 10))
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self._observe(), 1.0, False, self.left == 0, {}

    def _observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


class Walk(Chain):
    """Rewards differ, and some episodes terminate; of the choices, some are forbidden."""

    def __init__(self, choices: int = 4) -> None:
        super().__init__(choices)
        if choices:
            mask = gymnasium.spaces.MultiBinary(choices)
            self.observation_space = gymnasium.spaces.Dict({"seen": self.observation_space, "action_mask": mask})

    def step(self, action: Any) -> Any:
        self.left -= 1
        ends = self.left == 0
        terminates = bool(self.np_random.random() < 0.5)
        return self._observe(), float(self.np_random.normal()), ends and terminates, ends and not terminates, {}

    def _observe(self) -> Any:
        if isinstance(self.action_space, gymnasium.spaces.Box):
            return super()._observe()
        mask = np.ones(4, np.int8)
        mask[self.np_random.integers(4)] = 0
        return {"seen": super()._observe(), "action_mask": mask}


def worker_of(name: str, environment: str, n: int, **changes: Any) -> Any:
    soft = {"agent__learn_alpha": False, "agent__alpha": ALPHA, "agent__critics": 1}
    munchausen = {"agent__munchausen": 0.4, "agent__temperature": ALPHA}
    own = munchausen if name == "dqn" else soft
    options = {"env__options": ("choices=0",)} if name == "sac" else {}
    quick = {"agent__updates_per_step": 1.0, "agent__prioritized": True, "agent__importance_exponent": 0.0}
    given = quick | own | options | {"agent__n_step": n, "agent__gamma": GAMMA, "network__hidden": (16,)} | changes
    return make_worker(f"{__name__}:{environment}", name, **given)


def batch_of(worker: Any, steps: int = 200) -> Batch:
    begin(worker, 0)
    for _ in range(steps):
        worker.cache.accepts = lambda _: False
        collect(worker)
    batch: Batch = worker.cache.read()
    return batch


def errors(worker: Any, batch: Batch) -> Any:
    """|Q(s, a) − target| of each item, ``[B]``."""
    agent = worker.agent
    if hasattr(agent, "critic_loss"):
        return agent.critic_loss(agent.prepare(batch))[1]["priority"]
    if agent.config.sequence:
        seen: list[Any] = []
        agent.learn(
            batch,
            type("Look", (), {"sum": lambda _, x: x, "step": lambda _, f, b, group: seen.append(f(b)[1]) or {}})(),
        )
        return seen[0]["priority"]
    return agent.compute_loss(agent.with_shares(batch))[1]["priority"]


def set_constant(module: nn.Module, last: float) -> None:
    """Let a network say ``last`` whatever it sees."""
    for name, p in module.named_parameters():
        p.data.fill_(last if "projections" in name and p.shape[-1] and name.endswith("bias") else 0.0)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("name", ["sac", "discrete_sac", "dqn"])
def test_the_value_of_a_constant_reward_is_exact_for_every_n(name: str, memory: bool, n: int) -> None:
    """Q = (1 + γb + m) / (1 − γ), b the bonus of a state, m Munchausen's of an action: no target moves it."""
    worker = worker_of(name, "Chain", n, **(LSTM if memory else {}))
    agent = worker.agent
    if name == "sac":
        normal = 0.3  # of a standard normal and tanh of it, twice
        agent.draw = lambda batch, *shape: torch.full(shape, normal)
        log_prob = -0.5 * normal**2 - 0.5 * math.log(2 * math.pi) - math.log(1 - math.tanh(normal) ** 2)
        value = (1 - GAMMA * ALPHA * 2 * log_prob) / (1 - GAMMA)
    else:
        bonus = ALPHA * math.log(4)
        own = 0.4 * max(-ALPHA * math.log(4), -1) if name == "dqn" else 0.0
        value = (1 + own + GAMMA * bonus) / (1 - GAMMA)
        assert name == "dqn" or value == pytest.approx(16.238, abs=1e-3)
    critic = "q" if name == "dqn" else "critic"
    set_constant(agent.networks[critic], value)
    set_constant(agent.target.networks[critic], value)
    if name != "dqn":
        set_constant(agent.networks["actor"], 0.0)
    found = errors(worker, batch_of(worker))
    np.testing.assert_allclose(found.detach().numpy(), 0, atol=2e-5)
    worker.close()


def test_a_policy_of_the_entropy_that_discrete_sac_keeps() -> None:
    """The chain of four choices with 98% of the largest entropy, γ = 0.9 and α = 0.5 is worth 16.1."""
    worker = worker_of("discrete_sac", "Chain", 3)
    agent, low, high = worker.agent, 0.0, 3.0
    for _ in range(60):  # the logit of one choice over the others
        logit = (low + high) / 2
        p = np.exp([logit, 0, 0, 0]) / np.exp([logit, 0, 0, 0]).sum()
        entropy = -(p * np.log(p)).sum()
        low, high = (logit, high) if entropy > 0.98 * math.log(4) else (low, logit)
    value = (1 + GAMMA * ALPHA * entropy) / (1 - GAMMA)
    assert value == pytest.approx(16.1, abs=0.05)
    for networks in (agent.networks, agent.target.networks):
        set_constant(networks["critic"], value)
    set_constant(agent.networks["actor"], 0.0)
    agent.networks["actor"].projections["policy"].bias.data[0] = logit
    np.testing.assert_allclose(errors(worker, batch_of(worker)).detach().numpy(), 0, atol=2e-5)
    worker.close()


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", ["sac", "discrete_sac", "dqn"])
def test_targets_are_those_of_the_definition_on_what_was_written(name: str, n: int) -> None:
    """Summed step by step in float64 over the episodes as they were, with terminations, truncations and masks."""
    worker = worker_of(name, "Walk", n, env__num=2)
    agent, steps, acts = worker.agent, [], []
    env_write, agent_write = worker.cache.env_write, worker.cache.agent_write
    worker.cache.env_write = lambda step, *rest: (steps.append(deepcopy(step)), env_write(step, *rest))
    worker.cache.agent_write = lambda said, *rest: (acts.append(deepcopy(said)), agent_write(said, *rest))
    generator = torch.Generator().manual_seed(3)
    for module in (agent.networks, agent.target):
        for p in module.parameters():
            p.data.add_(0.5 * torch.randn(p.shape, generator=generator))
    batch = batch_of(worker)
    batch = agent.prepare(batch) if name != "dqn" else agent.with_shares(batch)
    nets = {True: deepcopy(agent.target.networks).double(), False: deepcopy(agent.networks).double()}
    plain = "observation" if name == "sac" else "seen"

    def run(network: str, time: int, row: int, target: bool = False, **more: Any) -> Any:
        seen = {plain: steps[time].observation[plain][row].double()[None, None]} | more
        out = nets[target][network](seen, HiddenState(), torch.zeros(1, 1, dtype=torch.bool))[0]
        return next(iter(out.values()))[0, 0].detach().numpy()

    def log_policy(logits: Any, time: int, row: int) -> Any:
        logits = np.where(steps[time].observation["action_mask"][row].numpy() == 0, -1e9, logits)
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def soft(time: int, row: int, normal: Any) -> tuple[float, float]:
        """V and the bonus of a state."""
        if name == "sac":
            mean, log_std = np.split(run("actor", time, row), 2)
            u = mean + np.exp(log_std.clip(-20, 2)) * normal
            log_prob = (-0.5 * normal**2 - log_std.clip(-20, 2) - 0.5 * np.log(2 * np.pi)).sum()
            log_prob -= np.log1p(-(np.tanh(u) ** 2)).sum()
            q = run("critic", time, row, True, **{ACTION: torch.from_numpy(np.tanh(u))[None, None]})
            return float(q[0]) - ALPHA * log_prob, -ALPHA * log_prob
        q = run("q" if name == "dqn" else "critic", time, row, True)
        log_p = log_policy(q / ALPHA if name == "dqn" else run("actor", time, row), time, row)
        entropy = -(np.exp(log_p) * log_p).sum()
        return float((np.exp(log_p) * q).sum()) + ALPHA * entropy, ALPHA * entropy

    def reward(time: int, row: int) -> float:
        """That of the action at a time, with Munchausen's part."""
        given = float(steps[time + 1].reward[row])
        if name != "dqn":
            return given
        log_p = log_policy(run("q", time, row, True) / ALPHA, time, row)[int(acts[time].action["action"][row])]
        return given + 0.4 * float(np.clip(ALPHA * log_p, -1, 0))

    found, seen_k = errors_of(agent, batch), set()
    for i, number in enumerate(batch.index.tolist()):  # type: ignore[union-attr]
        time, row = divmod(number, 2)
        k, total = 0, 0.0
        while True:
            total += GAMMA**k * reward(time + k, row)
            k += 1
            last = steps[time + k]
            if k == n or last.terminated[row] or last.truncated[row]:
                break
            normal = batch.experience["between"][k - 1, i].double().numpy() if name == "sac" else None
            total += GAMMA**k * soft(time + k, row, normal)[1]
        if not last.terminated[row]:
            normal = batch.experience["next"][0, i].double().numpy() if name == "sac" else None
            total += GAMMA**k * soft(time + k, row, normal)[0]
        action = acts[time].action["action"][row]
        if name == "sac":
            q = run("critic", time, row, **{ACTION: action.double().tanh()[None, None]})[0]
        else:
            q = run("q" if name == "dqn" else "critic", time, row)[int(action)]
        assert float(found[i]) == pytest.approx(abs(q - total), rel=1e-3, abs=2e-4)
        seen_k.add((k, bool(last.terminated[row])))
    assert len(seen_k) > n
    worker.close()


def errors_of(agent: Any, batch: Batch) -> Any:
    loss = agent.compute_loss if hasattr(agent, "head") else agent.critic_loss
    return loss(batch)[1]["priority"].detach()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sac", "dqn"])
def test_a_compiled_update_learns_the_same_from_windows(name: str) -> None:
    learned = []
    for compiles in (False, True):
        worker = worker_of(name, "Walk", 3)
        if compiles:
            worker.updater.compile(on_failure=pytest.fail)
        batch = batch_of(worker)
        learned.append([worker.agent.learn(batch, worker.updater).metrics for _ in range(2)][-1])
        worker.close()
    for key, value in learned[0].items():
        torch.testing.assert_close(learned[1][key], value, rtol=1e-4, atol=1e-5)
