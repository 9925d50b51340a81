"""The parts of the matrix: an environment of any spaces, networks of a user's own, and the choices to combine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

import ludus
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, Shapes
from ludus.core.types import Tensors

OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-3, 3, (5,), np.float32),
    "image HWC": spaces.Box(0, 255, (36, 36, 3), np.uint8),
    "image CHW": spaces.Box(0, 255, (4, 36, 36), np.uint8),
    "nested dict": spaces.Dict(
        {
            "camera": spaces.Dict({"left": spaces.Box(0, 255, (36, 36, 1), np.uint8)}),
            "speed": spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "gear": spaces.Discrete(4, start=-1),
            "flags": spaces.MultiBinary(2),
        }
    ),
    "tuple": spaces.Tuple((spaces.Box(-1, 1, (2, 3), np.float32), spaces.Box(0, 9, (), np.int32), spaces.Discrete(3))),
    "multidiscrete": spaces.MultiDiscrete([3, 2, 4]),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4, start=2),
    "discrete masked": spaces.Discrete(5),
    "multidiscrete": spaces.MultiDiscrete(np.array([[2, 3], [4, 2]])),
    "multidiscrete masked": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(3),
    "gaussian": spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, np.inf], np.float32)),
    "tanh": spaces.Box(-2, 5, (2,), np.float32),
    "beta": spaces.Box(0, 3, (1, 2), np.float64),
    "boxes": spaces.Dict({"arm": spaces.Box(-1, 2, (2, 1), np.float32), "leg": spaces.Box(0, 3, (1,), np.float32)}),
    "mixed masked": spaces.Dict(
        {
            "move": spaces.Discrete(3),
            "hand": spaces.Tuple((spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(2))),
            "force": spaces.Box(-1, 2, (2,), np.float32),
        }
    ),
}
MASKS: dict[str, spaces.Space[Any]] = {
    "discrete masked": spaces.MultiBinary(5),
    "multidiscrete masked": spaces.MultiBinary(5),
    "mixed masked": spaces.Dict({"move": spaces.MultiBinary(3), "hand/0": spaces.MultiBinary(5)}),
}
SIZES = {5: (3, 2), 3: (3,)}  # of mixed masked: how a mask's entries fall to the elements of its action


class MatrixEnv(gymnasium.Env[Any, Any]):
    """Random observations, rewards and endings in the spaces of the names given; it refuses a wrong action itself.

    The mask lies in the observation where that is a dict, else in info.
    """

    def __init__(self, observation: str = "vector", action: str = "discrete") -> None:
        self.kind = action
        self.action_space = ACTIONS[action]
        self.masked = action in MASKS
        space = OBSERVATIONS[observation]
        self.in_info = not isinstance(space, spaces.Dict)
        if self.masked and isinstance(space, spaces.Dict):
            space = spaces.Dict({**space.spaces, "action_mask": MASKS[action]})
        self.observation_space = space
        self.mask: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self._say()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        assert self.mask is None or allowed(self.kind, action, self.mask), f"{action!r} is masked by {self.mask!r}"
        observation, info = self._say()
        draw = self.np_random.random()
        return observation, float(self.np_random.normal()), draw < 0.15, 0.15 <= draw < 0.3, info

    def _say(self) -> tuple[Any, dict[str, Any]]:
        observation = self.observation_space.sample()
        if not self.masked:
            return observation, {}
        self.mask = self._draw(MASKS[self.kind])
        if self.in_info:
            return observation, {"action_mask": self.mask}
        return observation | {"action_mask": self.mask}, {}

    def _draw(self, space: Any) -> Any:
        """A mask of a few choices, with at least one for every element of the action."""
        if isinstance(space, spaces.Dict):
            return {name: self._draw(part) for name, part in space.spaces.items()}
        sizes = (5,) if self.kind == "discrete masked" else SIZES[int(space.n)]
        parts = [self.np_random.integers(0, 2, n) for n in sizes]
        for part in parts:
            part[self.np_random.integers(len(part))] = 1
        return np.concatenate(parts).astype(np.int8)


def allowed(kind: str, action: Any, mask: Any) -> bool:
    if kind == "discrete masked":
        return bool(mask[action])
    if kind == "mixed masked":
        mask, move, action = mask["hand/0"], mask["move"][action["move"]], action["hand"][0]
        return bool(move) and allowed("multidiscrete masked", action, mask)
    return bool(mask[action[0]] and mask[3 + action[1]])


def make_vector(num_envs: int, observation: str, action: str) -> Any:
    return gymnasium.vector.SyncVectorEnv([lambda: MatrixEnv(observation, action)] * num_envs)


gymnasium.register("Matrix-v0", entry_point=f"{__name__}:MatrixEnv", vector_entry_point=f"{__name__}:make_vector")


class TupleMasks(MatrixEnv):
    """Masks in info as Gymnasium's own spaces nest them: a tuple for a tuple, a tuple of parts for a MultiDiscrete."""

    def __init__(self, observation: str = "vector", action: str = "mixed masked") -> None:
        super().__init__(observation, action)

    def _say(self) -> tuple[Any, dict[str, Any]]:
        observation, _ = super()._say()
        dials = self.mask["hand/0"]
        return observation, {"action_mask": {"move": self.mask["move"], "hand": ((dials[:3], dials[3:]),)}}


def make_tuple_masks(num_envs: int) -> Any:
    return gymnasium.vector.SyncVectorEnv([TupleMasks] * num_envs)


gymnasium.register(
    "TupleMasks-v0", entry_point=f"{__name__}:TupleMasks", vector_entry_point=f"{__name__}:make_tuple_masks"
)


class Joined(nn.Module):
    """A user's plain module: whatever the observations are, all in one vector."""

    def __init__(self, inputs: Shapes) -> None:
        super().__init__()
        self.linear = nn.Linear(sum(int(np.prod(shape)) for shape in inputs.values()), 8)

    def forward(self, **observation: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([x.flatten(1) for x in observation.values()], 1)))


class Remembering(Network):
    """A user's network with a hidden state of its own: a GRU, step by step."""

    recurrent = True

    def __init__(self, inputs: Shapes, outputs: Shapes) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.cell = nn.GRUCell(sum(int(np.prod(shape)) for shape in inputs.values()), 8)
        self.last = nn.Linear(8, sum(shape[0] for shape in outputs.values()))

    def initial_state(self, batch: int) -> HiddenState:
        return HiddenState({"memory": torch.zeros(batch, 8)})

    def forward(self, observation: Tensors, state: HiddenState, first: Tensor) -> tuple[Tensors, HiddenState]:
        x = torch.cat([observation[name].flatten(2) for name in self.inputs], 2)
        seen = []
        for now, begins in zip(x, first, strict=True):
            state = HiddenState({"memory": self.cell(now, state.reset(begins)["memory"])})
            seen.append(state["memory"])
        parts = self.last(torch.stack(seen)).split([shape[0] for shape in self.outputs.values()], -1)
        return dict(zip(self.outputs, parts, strict=True)), state


NETWORKS: dict[str, dict[str, Any]] = {
    "separate": {"network.shared": "no"},
    "shared": {"network.shared": "yes"},
    "lstm body": {"network.body": "lstm"},
    "lstm source and body": {"network.net1d": "lstm", "network.body": "lstm", "network.shared": "yes"},
    "own module": {"network.name": f"{__name__}:Joined"},
    "own network": {"network.name": f"{__name__}:Remembering"},
}
BACKENDS = ("simple", "vector")
LEARNING: dict[str, dict[str, Any]] = {
    "ppo": {"agent.epochs": 2, "agent.minibatches": 2},
    "ppo by KL": {
        "agent.epochs": 1,
        "agent.minibatches": 3,
        "agent.learning_rate_schedule": "kl",
        "agent.target_kl": 0.01,
        "agent.value_clip": 0.2,
        "engine": "torch",
    },
    "a2c": {},
    "a2c by n steps": {"agent.n_step": 3, "agent.optimizer": "adam", "agent.normalize_advantage": True},
    "trpo": {"agent.value_epochs": 2, "agent.minibatches": 2},
    "reinforce": {"agent.learning_rate": 1e-4},  # after many large steps, rounding would exceed the tolerance
}
FACTORS: list[tuple[Any, ...]] = [
    tuple(NETWORKS),
    tuple(OBSERVATIONS),
    tuple(ACTIONS),
    tuple(LEARNING),
    BACKENDS,
    (False, True),  # normalizers
]
Choice = tuple[Any, ...]  # one of each factor


def pairwise(
    seed: int, factors: list[tuple[Any, ...]] = FACTORS, possible: Callable[[Choice], bool] = lambda choice: True
) -> list[Choice]:
    """Few choices that hold every pair of values of two factors: greedily, the best of some random ones each time."""
    rng = random.Random(seed)
    pairs = {choice: _pairs(choice) for choice in itertools.product(*factors) if possible(choice)}
    holding: dict[Any, list[Choice]] = {}
    for choice, own in pairs.items():
        for pair in own:
            holding.setdefault(pair, []).append(choice)
    open_pairs, chosen = set(holding), list[Choice]()
    for start in sorted(holding, key=repr):
        if start in open_pairs:
            best = max(rng.choices(holding[start], k=60), key=lambda choice: len(pairs[choice] & open_pairs))
            open_pairs -= pairs[best]
            chosen.append(best)
    return chosen


def _pairs(choice: Choice) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(itertools.combinations(enumerate(choice), 2))


def settings_of(choice: Choice, folder: Path) -> tuple[str, str, dict[str, Any]]:
    """Environment, agent and settings of a tiny run of two updates and one evaluation."""
    network, observation, action, learning, backend, normalized = choice
    settings = common(observation, action, backend, folder) | {
        "agent.normalize_observation": normalized,
        "agent.normalize_reward": normalized,
    }
    if learning != "reinforce":  # learns from whole episodes
        settings["agent.rollout"] = 6
    if action in ("tanh", "beta"):
        settings["agent.distribution"] = action
    return environment_of(backend), learning.split()[0], settings | NETWORKS[network] | LEARNING[learning]


def common(observation: str, action: str, backend: str, folder: Path) -> dict[str, Any]:
    """What all tiny runs have."""
    return {
        "runs": str(folder),
        "quiet": True,
        "threads": 1,
        "evaluation.episodes": 2,
        "evaluation.every": 0,
        "env.num": 3,
        "env.options": (f"observation='{observation}'", f"action='{action}'"),
        "env.backend": "auto" if backend == "simple" else backend,
        "network.hidden": (8,),
        "network.lstm_size": 4,
    }


def environment_of(backend: str) -> str:
    return "Matrix-v0" if backend == "vector" else f"{__name__}:MatrixEnv"


def refusal(environment: Any, agent: str, settings: dict[str, Any], said: str, folder: Path) -> str:
    """The one line with which a run is refused before anything was learned, with no run folder left behind."""
    with pytest.raises(UserError, match=r"^[^\n]+$") as caught:
        ludus.train(environment, agent, nb_step=36, preset="none", settings=settings)
    assert said in str(caught.value)
    assert not any(folder.iterdir())
    return str(caught.value)
