from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.environments.config import EnvConfig
from ludus.environments.toy import CountingEnv, MaskedEnv, MixedActionEnv, TargetEnv
from ludus.managers.make import make_manager
from ludus.managers.simple import SimpleEnvManager
from ludus.managers.vector import VectorEnvManager


@pytest.mark.parametrize(
    ("settings", "arguments", "kind"),
    [
        ({}, {}, VectorEnvManager),
        ({"max_episode_steps": 7}, {}, VectorEnvManager),
        ({"options": ("sutton_barto_reward=true",)}, {}, VectorEnvManager),
        ({"backend": "simple"}, {}, SimpleEnvManager),
        ({}, {"render_mode": "rgb_array"}, SimpleEnvManager),
        ({"id": "Pendulum-v1"}, {}, SimpleEnvManager),
        ({"id": "ludus.environments.toy:CountingEnv"}, {}, SimpleEnvManager),
        ({}, {"environment": CountingEnv}, SimpleEnvManager),
        ({"wrappers": ("gymnasium.wrappers:FlattenObservation",)}, {}, SimpleEnvManager),
        ({"backend": "subproc"}, {"render_mode": "rgb_array"}, SimpleEnvManager),
        ({"repeat_seeds": 2}, {}, SimpleEnvManager),
    ],
)
def test_auto_backend(settings, arguments, kind):
    manager = make_manager(EnvConfig(**settings), num=6, **arguments)
    assert type(manager) is kind
    assert (manager.batch, manager.groups) == (6, [slice(0, 6)])
    manager.close()


def test_few_environments_use_the_simple_manager():
    manager = make_manager(EnvConfig(), num=5)
    assert type(manager) is SimpleEnvManager
    manager.close()


@pytest.mark.parametrize(
    ("settings", "arguments", "says"),
    [
        ({"backend": "vector", "id": "Pendulum-v1"}, {}, "no native vector"),
        ({"backend": "vector", "options": ("gravity=1",)}, {}, "no native vector"),
        ({"backend": "envpool", "id": "a.b:C"}, {}, "leave it at auto"),
        ({"backend": "vector"}, {"environment": CountingEnv}, "leave it at auto"),
        ({"backend": "envpool", "id": "Pnog-v5"}, {}, 'Did you mean "Pong-v5"'),
        ({"backend": "envpool", "options": ("sticky=1",)}, {}, "refused the options"),
        ({}, {"num": 0}, "at least 1"),
        ({"id": "CartPol-v1"}, {}, "Did you mean"),
        ({"backend": "subproc"}, {"environment": lambda: CountingEnv()}, "cannot be imported by another process"),
        ({"backend": "subproc"}, {"environment": partial(CountingEnv, 3)}, "cannot be imported by another process"),
        ({"wrappers": ("gymnasium.wrappers:Flat",)}, {}, "Did you mean"),
        ({"wrappers": ("gymnasium.wrappers:FlattenObservation",), "backend": "vector"}, {}, "supports no wrappers"),
    ],
)
def test_invalid_settings_raise(settings, arguments, says):
    with pytest.raises(UserError, match=says):
        make_manager(EnvConfig(**settings), **arguments)


def test_missing_envpool_raises(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "envpool", None)
    with pytest.raises(UserError, match="pip install envpool"):
        make_manager(EnvConfig(backend="envpool"))


@pytest.mark.parametrize("backend", ["simple", "subproc"])
def test_repeated_seeds(backend):
    """Pairs of rows play the same episodes in training, also where a rank begins in the middle of a pair."""
    config = EnvConfig(num=6, backend=backend, repeat_seeds=2, max_episode_steps=3)
    managers = [make_manager(config, num, branch=b) for num, b in ((6, 0), (Rows(3, 6, 6), 0), (6, 1))]
    found = [first_observations(manager) for manager in managers]
    for manager in managers:
        manager.close()
    whole, rank, evaluation = found
    assert [row for row in range(5) if np.array_equal(whole[row], whole[row + 1])] == [0, 2, 4]
    assert np.array_equal(rank, whole[3:])
    assert len(np.unique(evaluation, axis=0)) == 6


def first_observations(manager):
    """Return the observations ``[B, 2 · F]`` of the beginnings of two episodes."""
    first = manager.reset(0).observation["observation"].numpy().copy()
    for _ in range(4):
        step = manager.step({"action": torch.zeros(manager.batch, dtype=torch.int64)})
    assert step.first.all()
    return np.concatenate([first, step.observation["observation"].numpy()], 1)


def test_negative_seed_raises():
    with pytest.raises(UserError, match="seed is -1"):
        make_manager(EnvConfig()).reset(-1)


def test_native_cartpole_truncates_at_500_and_resets_at_the_next_step():
    """Physics is turned off, so that only the time limit ends an episode."""
    manager = make_manager(EnvConfig(backend="vector"), num=3)
    manager._env.gravity = manager._env.force_mag = 0.0
    step = manager.reset(0)
    manager._env.state[:] = 0
    action = {"action": torch.zeros(3, dtype=torch.int64)}
    for time in range(1, 1003):
        step = manager.step(action)
        if time == 501:
            assert step.first.all()
            assert step.reward.tolist() == [0, 0, 0]
            manager._env.state[:] = 0
        else:
            assert not step.first.any()
            assert step.reward.tolist() == [1, 1, 1]
        assert step.truncated.all().item() == step.truncated.any().item() == (time in (500, 1001))
        assert not step.terminated.any()
        if time == 1001:
            break
    assert [(e.row, e.reward, e.length, e.seed) for e in manager.episodes()] == [
        (row, 500.0, 500, None) for row in (0, 1, 2)
    ] * 2


def test_max_episode_steps_of_native_environment():
    manager = make_manager(EnvConfig(max_episode_steps=4), num=2)
    manager.reset(0)
    for _ in range(4):
        step = manager.step({"action": torch.zeros(2, dtype=torch.int64)})
    assert step.truncated.all()


@pytest.mark.parametrize("backend", ["simple", "sync"])
@pytest.mark.parametrize("in_info", [False, True])
def test_masks_are_observations(backend, in_info):
    make = lambda: MaskedEnv(in_info=in_info)  # noqa: E731
    if backend == "simple":
        manager = SimpleEnvManager(make, 3, "masked")
    else:
        manager = VectorEnvManager(gymnasium.vector.SyncVectorEnv([make] * 3), "masked")
    assert set(manager.observation) == {"observation", "action_mask"}
    step = manager.reset(0)
    for _ in range(40):
        mask, shown = step.observation["action_mask"], step.observation["observation"]
        assert (mask.dtype, mask.shape) == (torch.bool, (3, 10))
        assert (mask.sum(1) == 3).all()
        target = shown.argmax(1)
        assert mask.gather(1, target[:, None]).all()
        running = ~(step.terminated | step.truncated)
        step = manager.step({"action": target})
        assert (step.reward[running] == 1).all()  # the mask and the target of this very step were right


class Board(gymnasium.Env):
    """A board of 200 kinds of cells; from the ``late``-th observation on, one is of a kind that does not exist."""

    def __init__(self, late=1):
        self.observation_space = gymnasium.spaces.MultiDiscrete(np.full((3, 4), 200))
        self.action_space = gymnasium.spaces.Discrete(2)
        self.late, self.count = late, 0

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        return self._observe(), 0.0, False, False, {}

    def _observe(self):
        return np.full((3, 4), 2**16 if self.count >= self.late else 199)  # 0 in 16 bits


@pytest.mark.parametrize("late", [0, 1])
def test_choices_outside_of_the_space_are_refused_in_vector_environments(late):
    manager = VectorEnvManager(gymnasium.vector.SyncVectorEnv([lambda: Board(late)] * 2), "Board")
    action = {"action": torch.zeros(2, dtype=torch.int64)}
    if late:
        manager.reset(0)
    with pytest.raises(UserError, match=r"has the choice 65536 .* its space has 200"):
        manager.step(action) if late else manager.reset(0)


def test_mixed_actions_are_transformed_by_name():
    manager = SimpleEnvManager(lambda: MixedActionEnv(more=True), 2, "mixed")
    assert {n: s.kind for n, s in manager.action.items()} == {
        "amount": "continuous", "choice": "categorical", "dials": "categorical", "switches": "binary",
    }  # fmt: skip
    manager.set_action_transform({"amount": "clip", "choice": "none"})
    step = manager.reset(0)
    for _ in range(5):
        shown = step.observation["observation"]
        step = manager.step(
            {
                "choice": shown[:, :3].argmax(1),
                "amount": shown[:, 3:5],
                "switches": shown[:, 5:7],
                "dials": shown[:, 7:9].long(),
            }
        )
        np.testing.assert_allclose(step.reward, 1, atol=1e-6)


def test_continuous_actions_are_rescaled_to_the_box():
    manager = SimpleEnvManager(TargetEnv, 2, "target")
    manager.set_action_transform({"action": "clip"})
    step = manager.reset(0)
    target = step.observation["observation"].flip(1)
    np.testing.assert_allclose(manager.step({"action": target / 2}).reward, 0, atol=1e-6)


def test_render():
    manager = make_manager(EnvConfig(), num=1, render_mode="rgb_array")
    manager.reset(0)
    assert manager.render().shape[-1] == 3
    manager.close()
