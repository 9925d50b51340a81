"""TensorEnvManager: same-step resets, episode statistics on the device, rescaled actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.core.step import EnvStep
from ludus.environments.config import EnvConfig
from ludus.environments.tensor_toy import TensorCue
from ludus.managers.make import make_manager
from ludus.managers.tensor import TensorEnvManager, tensor_transform
from ludus.preprocess.actions import ActionPreprocessor

CUE = "ludus.environments.tensor_toy:TensorCue"


def make(num: int = 3, **options: Any) -> TensorEnvManager:
    return TensorEnvManager(TensorCue(num, **options), "TensorCue")


def act(rows: int, value: int = 1) -> dict[str, Tensor]:
    return {"action": torch.full((rows,), value)}


@pytest.mark.parametrize("truncates", [False, True], ids=["terminated", "truncated"])
def test_rows_are_reset_in_the_step_of_their_ending(truncates: bool) -> None:
    manager = make(length=2, truncates=truncates)
    step = manager.reset(0)
    assert step.first.all()
    assert not step.real.any()
    cue = step.observation["observation"][:, :2].argmax(-1)
    step = manager.step(act(3))
    assert step.real.all()
    assert not step.first.any()
    step = manager.step(act(3))
    assert (step.first & step.real).all()
    assert (step.truncated if truncates else step.terminated).all()
    assert step.reward.tolist() == (cue == 1).float().tolist()
    assert step.final is not None
    assert step.final["observation"][:, 2].tolist() == [1, 1, 1]  # the whole episode is over
    assert step.observation["observation"][:, 2].tolist() == [0, 0, 0]  # and the next begun
    assert [(e.row, e.reward, e.length) for e in manager.episodes()] == [
        (row, float(cue[row] == 1), 2) for row in range(3)
    ]
    assert manager.episodes() == []


def test_episodes_of_several_steps() -> None:
    manager = make(2, length=3)
    manager.reset(0)
    for _ in range(7):
        manager.step(act(2))
    assert [(e.row, e.length) for e in manager.episodes()] == [(0, 3), (1, 3), (0, 3), (1, 3)]


def test_missing_final_observations_are_reported_once() -> None:
    manager, told = make(gives_final=False), []
    manager.on_warning = told.append
    manager.reset(0)
    assert [manager.step(act(3)).final for _ in range(5)] == [None] * 5
    assert len(told) == 1
    assert "gives no final observations" in told[0]


def test_loaded_state_continues_exactly() -> None:
    one, two = make(length=3), make(length=3)
    one.reset(5)
    for _ in range(4):
        one.step(act(3))
    two.load_state_dict(one.state_dict())
    assert two.restored == "exactly"
    assert same(one.last_step(), two.last_step())
    for i in range(7):
        assert same(one.step(act(3, i % 2)), two.step(act(3, i % 2)))
    assert one.episodes() == two.episodes()


def test_environment_without_state_dict_starts_new_episodes() -> None:
    class Forgetful:
        def __init__(self) -> None:
            cue = TensorCue(3)
            self.num_envs, self.reset, self.step = 3, cue.reset, cue.step
            self.observation_space, self.action_space = cue.observation_space, cue.action_space

    one, two = (TensorEnvManager(Forgetful(), "Forgetful") for _ in range(2))
    first = one.reset(0).observation["observation"].clone()
    one.step(act(3))
    two.load_state_dict(one.state_dict())
    assert two.restored.startswith("restarted at an episode boundary")
    assert two.last_step().first.all()
    assert not two.last_step().real.any()
    assert two.last_step().observation["observation"].shape == first.shape


@pytest.mark.parametrize("how", ["clip", "tanh", "unit"])
def test_actions_are_rescaled_as_in_numpy(how: str) -> None:
    for spec in (Spec((2,), "float32", low=(-2.0, 0.5), high=(4.0, 1.0)), Spec((2,), "int32", low=-3.0, high=5.0)):
        x = torch.randn(50, 2) * 2
        expected = ActionPreprocessor({"action": spec}, {"action": how})({"action": x.numpy()})["action"]
        found = tensor_transform(spec, how)(x).numpy()
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_make_manager() -> None:
    manager = make_manager(EnvConfig(id=CUE, num=5, backend="tensor", options=("length=7",)))
    assert isinstance(manager, TensorEnvManager)
    assert manager.batch == 5
    assert manager.reset(0).observation["observation"].shape == (5, 3)
    for config, told in (
        (EnvConfig(id="CartPole-v1", backend="tensor"), "is not a class"),
        (EnvConfig(id="ludus.environments.toy:MemoryEnv", backend="tensor"), "num_envs"),
        (EnvConfig(id=CUE, backend="tensor", max_episode_steps=5), "its own limit"),
    ):
        with pytest.raises(UserError, match=told):
            make_manager(config)


def same(a: EnvStep, b: EnvStep) -> bool:
    pairs = [*zip(a[1:6], b[1:6], strict=True), *((x, b.observation[name]) for name, x in a.observation.items())]
    return all(torch.equal(x, y) for x, y in pairs)
