"""MinAtar's Breakout, and a network for it that Stable-Baselines3 and Ludus can both use.

Atari's Pong takes DQN a million frames and two cores a day; MinAtar (Young and Tian 2019) keeps the game in 10×10 cells
with a channel per kind of thing, and a direction in them, so that no frames are stacked. It is no dependency of ours:
``pip install --no-deps minatar`` (what it needs beyond numpy only draws).
"""

from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from torch import Tensor, nn

from ludus.core.hidden_state import HiddenState
from ludus.core.network import Shape, SubModule
from ludus.networks.cast import cast_shape
from ludus.networks.config import NetworkConfig

FEATURES = 128
LONGEST = 2_500  # steps of an episode: a perfect player would never end one


class Breakout(gymnasium.Env[Any, Any]):
    """Breakout of 10×10 cells and 4 channels as bytes 0 and 255, with three actions and sticky ones at 10%."""

    def __init__(self) -> None:
        logging.disable(logging.WARNING)  # minatar warns that it cannot draw
        try:
            from minatar import Environment
        except ImportError as error:
            raise SystemExit("This job needs MinAtar: pip install --no-deps minatar") from error
        finally:
            logging.disable(logging.NOTSET)
        self._game = Environment("breakout")
        self._actions = self._game.minimal_action_set()
        self._steps = 0
        self.observation_space = spaces.Box(0, 255, (4, 10, 10), np.uint8)
        self.action_space = spaces.Discrete(len(self._actions))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self._game.seed(int(self.np_random.integers(2**31)))
        self._game.reset()
        self._steps = 0
        return self._image(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step one frame."""
        reward, terminated = self._game.act(self._actions[int(action)])
        self._steps += 1
        return self._image(), float(reward), bool(terminated), self._steps >= LONGEST, {}

    def _image(self) -> Any:
        return self._game.state().transpose(2, 0, 1).astype(np.uint8) * np.uint8(255)


def layers(channels: int) -> nn.Sequential:
    """The network of MinAtar's authors: 16 features of 3×3, then a layer of 128; images 0…1 in, vectors out."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, FEATURES), nn.ReLU()
    )


class SmallCNN(SubModule):
    """Those layers as a piece of Ludus' networks: ``network.net3d``."""

    dim = 3

    def __init__(self, input_shape: Shape, config: NetworkConfig) -> None:
        super().__init__(input_shape)
        self.layers = layers(input_shape[0])

    def output_shape(self, dim: int | None = None) -> Shape:
        return cast_shape((FEATURES,), dim)

    def forward(self, x: Tensor, state: HiddenState, first: Tensor) -> tuple[Tensor, HiddenState]:
        return self.layers(x), state


def sb3_policy() -> dict[str, Any]:
    """Those layers as Stable-Baselines3 wants them: ``policy_kwargs`` of a CnnPolicy."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Extractor(BaseFeaturesExtractor):
        """Features of an image that is 0…1 already."""

        def __init__(self, observation_space: spaces.Box) -> None:
            super().__init__(observation_space, FEATURES)
            self.layers = layers(observation_space.shape[0])

        def forward(self, observations: Tensor) -> Tensor:
            return self.layers(observations)  # type: ignore[no-any-return]

    return {"features_extractor_class": Extractor, "net_arch": []}
