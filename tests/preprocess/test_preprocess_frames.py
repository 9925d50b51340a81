"""Stacked frames become one image with the channels of all frames."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import ludus
from ludus.containers.build import build_agent, build_manager
from ludus.core.rows import Rows
from ludus.core.spec import Spec
from ludus.networks.net3d.nature_cnn import NatureCNN
from ludus.preprocess.observation import ObsPreprocessor, make_ops
from ludus.settings.settings import resolve_settings

T, B, S, H, W = 3, 2, 4, 8, 9


def bytes_of(shape: tuple[int, ...], **changes: Any) -> Spec:
    return Spec(**({"shape": shape, "dtype": "uint8", "low": 0, "high": 255, "stack": shape[0]} | changes))


def prepared(spec: Spec) -> tuple[Tensor, Tensor]:
    """Bytes of a spec, and what becomes of them."""
    preprocess = ObsPreprocessor({"x": spec})
    x = torch.randint(0, 256, (T, B, *spec.shape), dtype=torch.uint8)
    y = preprocess({"x": x})["x"]
    assert y.shape == (T, B, *preprocess.shapes["x"])
    assert y.dtype == torch.float32
    return x, y


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_channels_last_frames_are_merged(channels: int) -> None:
    x, y = prepared(bytes_of((S, H, W, channels)))
    assert y.shape == (T, B, S * channels, H, W)
    for frame in range(S):
        for channel in range(channels):
            torch.testing.assert_close(y[:, :, frame * channels + channel], x[:, :, frame, ..., channel] / 255)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_channels_first_frames_are_merged(channels: int) -> None:
    spec = bytes_of((S, channels, H, W))
    x, y = prepared(spec)
    assert y.shape == (T, B, S * channels, H, W)
    torch.testing.assert_close(y, x.flatten(2, 3) / 255)
    merge, _ = make_ops("x", spec)
    assert merge(x).data_ptr() == x.data_ptr()  # without a copy


@pytest.mark.parametrize(
    "spec",
    [
        bytes_of((S, H, W, 2)),  # not an image: 2 channels
        bytes_of((S, H, W, 5)),
        bytes_of((S, H, W)),  # an image already
        bytes_of((S, H, W), dtype="float32"),
    ],
    ids=lambda spec: f"{spec.shape}-{spec.dtype}-{spec.high}-{spec.stack}",
)
def test_ambiguous_shapes_are_not_merged(spec: Spec) -> None:
    assert ObsPreprocessor({"x": spec}).shapes == {"x": spec.shape}


@pytest.mark.parametrize(
    "spec",
    [
        bytes_of((S, H, W, 3), stack=1),  # not declared as a stack
        bytes_of((2 * S, H, W, 3), stack=S),  # more than one of something per frame
        bytes_of((S, H, W, 3), dtype="float32"),
        bytes_of((S, H, W, 3), high=7),
    ],
    ids=lambda spec: f"{spec.shape}-{spec.dtype}-{spec.high}-{spec.stack}",
)
def test_what_is_no_stack_of_images_is_a_clip(spec: Spec) -> None:
    assert ObsPreprocessor({"x": spec}).shapes == {"x": (3, spec.shape[0], H, W)}


class Img(gym.Env[NDArray[np.uint8], np.int64]):
    """Images of 48×48 in color that grow brighter; the second action is rewarded."""

    observation_space = gym.spaces.Box(0, 255, (48, 48, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self._seen(), float(action), self.time >= 20, False, {}

    def _seen(self) -> NDArray[np.uint8]:
        return np.full((48, 48, 3), 10 * self.time, np.uint8)


SMALL: dict[str, Any] = {
    "env.num": 2,
    "env.workers": 0,
    "env.wrappers": ("gymnasium.wrappers:FrameStackObservation(stack_size=4)",),
    "agent.replay": 120,
    "agent.warmup": 40,
    "agent.batch_size": 8,
    "evaluation.every": 0,
    "evaluation.episodes": 1,
    "compile": "off",
    "threads": 1,
    "quiet": True,
}


@pytest.mark.parametrize("agent", ["dqn", "rainbow"])
def test_stacked_color_images_reach_the_cnn(agent: str) -> None:
    settings = resolve_settings(f"{__name__}:Img", agent, "none", None, SMALL).settings
    manager = build_manager(settings)
    try:
        made: Any = build_agent(settings, manager.observation, manager.action, torch.device("cpu"))
        (spec,) = manager.observation.values()
    finally:
        manager.close()
    assert (spec.shape, spec.stack) == ((4, 48, 48, 3), 4)
    assert list(made.preprocess.shapes.values()) == [(12, 48, 48)]
    assert any(isinstance(module, NatureCNN) for module in made.modules())
    assert sum(p.numel() for p in made.parameters()) < 3_000_000


def test_dqn_learns_from_stacked_color_images(tmp_path: Any) -> None:
    settings = SMALL | {"nb_step": 160, "agent.updates_per_step": 0.2, "runs": str(tmp_path)}  # more than the replay
    assert ludus.train(f"{__name__}:Img", "dqn", preset="none", settings=settings).steps >= 160


def test_a_replay_stores_each_frame_of_a_stack_by_settings_once() -> None:
    pipeline = ("grayscale, resize(height=18, width=18), stack(n=3)", "previous_action")
    changes = {"preprocess.observation": pipeline, "nb_step": 2_000, "agent.replay": 400, "agent.warmup": 100}
    settings = resolve_settings("ludus.environments.image_toy:CatchEnv", "dqn", "none", None, changes).settings
    manager = build_manager(settings)
    agent: Any = build_agent(settings, manager.observation, manager.action, torch.device("cpu"))
    assert manager.observation["observation"].stack == 3
    assert agent.preprocess.shapes == {"observation": (3, 18, 18), "previous_action": (3,)}
    cache = agent.make_cache(Rows.all(8))
    assert list(cache._frames) == ["observation"]
    manager.close()
