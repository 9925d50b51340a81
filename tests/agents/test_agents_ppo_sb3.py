"""PPO through a shared CNN takes the same steps as Stable-Baselines3's from the same rollout and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from agents_setup import make_worker
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor

from ludus.containers.loop import begin, collect
from ludus.core.batch import Batch
from ludus.environments.image_toy import CatchEnv

STEPS, ROWS, MINIBATCHES, EPOCHS = 32, 4, 4, 4


def make_sb3() -> Any:
    env = DummyVecEnv([CatchEnv] * ROWS)
    size = STEPS * ROWS // MINIBATCHES
    model = PPO("CnnPolicy", env, learning_rate=3e-4, n_steps=STEPS, batch_size=size, n_epochs=EPOCHS, device="cpu")
    model.set_logger(Logger(None, []))
    return model


def pairs(agent: torch.nn.Module, policy: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Our parameters, each with SB3's; a 36×36 image leaves one pixel, so no layer has its inputs in another order."""
    theirs = {
        **{f"convolutions.{i}": policy.features_extractor.cnn[2 * i] for i in range(3)},
        "linear": policy.features_extractor.linear[0],
        "policy/action": policy.action_net,
        "value": policy.value_net,
    }
    ours = dict(agent.named_parameters())
    found = {}
    for name, layer in theirs.items():
        for kind in ("weight", "bias"):
            (own,) = [p for key, p in ours.items() if key.endswith(f"{name}.{kind}")]
            found[f"{name}.{kind}"] = own, getattr(layer, kind)
    assert len(found) == len(ours) == sum(1 for _ in policy.parameters())
    return found


def fill(model: Any, batch: Batch, last_value: Tensor) -> None:
    """Put our rollout into SB3's buffer, which computes advantages and returns of its own."""
    model.rollout_buffer.reset()
    for t in range(STEPS):
        model.rollout_buffer.add(
            batch.observation["observation"][t].movedim(-1, 1).numpy(),
            batch.action["action"][t].unsqueeze(-1).numpy(),
            batch.reward[t].numpy(),
            batch.first[t].numpy(),
            batch.experience["value"][t].clone(),
            batch.experience["log_prob"][t].clone(),
        )
    model.rollout_buffer.compute_returns_and_advantage(last_value, np.zeros(ROWS, bool))


def unbiased(values: list[Tensor], real: list[Tensor], **_: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Normalize as SB3 does, with a divisor of n − 1: with 32 rows that makes 1.6% less."""
    return [(x - x.mean()) / (x.std() + 1e-8) for x in values], [rows / rows.sum() for rows in real]


def test_updates_equal_those_of_stable_baselines3(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"env__num": ROWS, "agent__rollout": STEPS, "agent__epochs": EPOCHS, "agent__minibatches": MINIBATCHES}
    plain = {"agent__normalize_reward": False, "agent__normalize_observation": False}
    worker = make_worker(
        "ludus.environments.image_toy:CatchEnv", network__shared="yes", agent__learning_rate=3e-4, **sizes, **plain
    )
    agent: Any = worker.agent
    model = make_sb3()
    both = pairs(agent, model.policy)
    with torch.no_grad():
        for own, other in both.values():
            assert own.norm() == pytest.approx(float(other.norm()), rel=1e-4)  # the same first weights, but for chance
            other.copy_(own)
    monkeypatch.setattr("ludus.agents.actor_critic.normalize_each", unbiased)
    begin(worker, 0)
    for _ in range(2):  # what remains of the first rollout must not change the second
        collect(worker)
        batch = worker.cache.read()
        prepared = agent.prepare(batch)
        with torch.no_grad():
            last = torch.from_numpy(batch.observation["observation"][-1].numpy()).movedim(-1, 1)
            fill(model, batch, model.policy.predict_values(last))
        for name, own in (("advantages", "advantage"), ("returns", "return")):
            theirs = getattr(model.rollout_buffer, name)
            np.testing.assert_allclose(prepared.experience[own].numpy(), theirs, atol=1e-5)
        twin = torch.Generator()
        twin.set_state(agent.generator.get_state())

        def permutation(n: int, twin: torch.Generator = twin) -> Any:
            order = torch.randperm(n, generator=twin).numpy()  # ours lie row by row in time, SB3's column by column
            return order % ROWS * STEPS + order // ROWS

        monkeypatch.setattr(np.random, "permutation", permutation)
        before = {name: own.detach().clone() for name, (own, _) in both.items()}
        model.train()
        agent.learn(batch, worker.updater)
        for name, (own, other) in both.items():
            moved = float((own - before[name]).detach().abs().max())
            assert moved > 1e-4, name
            assert float((own - other).detach().abs().max()) < 0.02 * moved, name
            with torch.no_grad():
                other.copy_(own)  # rounding grows from rollout to rollout
    worker.close()
    worker.manager.close()
