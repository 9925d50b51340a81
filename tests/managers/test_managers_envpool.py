from __future__ import annotations

import pytest
import torch

from ludus.environments.config import EnvConfig
from ludus.managers.make import make_manager

pytest.importorskip("envpool")


def pool(id, num=4, **settings):
    return make_manager(EnvConfig(id=id, num=num, backend="envpool", **settings))


def run(manager, seed, steps, choices):
    """Random steps; returns what was seen and the endings of the step before each."""
    generator = torch.Generator().manual_seed(0)
    step = manager.reset(seed)
    assert step.first.all()
    seen = [step.observation["observation"].clone()]
    ended = torch.zeros(manager.batch, dtype=torch.bool)
    for _ in range(steps):
        step = manager.step({"action": torch.randint(0, choices, (manager.batch,), generator=generator)})
        assert torch.equal(step.first, ended)
        assert (step.reward[step.first] == 0).all()
        assert not (step.terminated | step.truncated)[step.first].any()
        ended = step.terminated | step.truncated
        seen.append(step.observation["observation"].clone())
    return torch.stack(seen)


def test_cartpole_ends_and_begins_as_it_should():
    manager = pool("CartPole-v1", max_episode_steps=20)
    seen = run(manager, 1, 200, 2)
    episodes = manager.episodes()
    assert max(e.length for e in episodes) == 20
    assert all(e.reward == e.length for e in episodes)
    assert all(e.seed is None for e in episodes)
    assert torch.equal(seen, run(manager, 1, 200, 2))
    assert not torch.equal(seen, run(manager, 2, 200, 2))
    assert not torch.equal(seen[0, 0], seen[0, 1])  # each row has a seed of its own
    manager.close()
    manager.close()


def test_lunar_lander():
    manager = pool("LunarLander-v3")
    spec = manager.observation["observation"]
    assert (spec.shape, spec.low, spec.high) == ((8,), float("-inf"), float("inf"))  # EnvPool says [1e-38, 3e38]
    run(manager, 0, 400, 4)
    episodes = manager.episodes()
    assert len(episodes) > 4
    assert all(e.reward < 100 and e.length > 20 for e in episodes)


def test_pong_gives_stacked_bytes():
    manager = pool("Pong-v5", num=2)
    spec = manager.observation["observation"]
    assert (spec.shape, spec.dtype, spec.stack, manager.action["action"].sizes) == ((4, 84, 84), "uint8", 4, (6,))
    step = manager.reset(0)
    for _ in range(5):
        step = manager.step({"action": torch.tensor([2, 3])})
    assert step.observation["observation"].shape == (2, 4, 84, 84)
    assert step.observation["observation"].float().std() > 1


def test_continuous_actions_and_wide_floats():
    manager = pool("Pendulum-v1", num=2)
    manager.use({"action": "clip"})
    manager.reset(0)
    step = manager.step({"action": torch.tensor([[9.0], [-9.0]])})
    assert (step.reward < 0).all()
    assert step.reward.dtype == torch.float32
