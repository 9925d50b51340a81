"""Maps, lists, graphs and clips with every kind of network and action: it trains, or is refused at build.

The fast test covers every pair of choices once; the slow one takes the whole product.
"""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from matrix_parts import Choice, pairwise

from ludus.containers.build import build_agent, build_evaluator, build_manager
from ludus.containers.local import LocalWorker
from ludus.containers.loop import begin, collect
from ludus.containers.updater import LocalUpdater
from ludus.core.errors import UserError
from ludus.settings.settings import resolve_settings

SIDE, MOST = 6, 4  # of maps; entities
PIXELS = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
VECTOR = spaces.Box(-3, 3, (5,), np.float32)
ENTITY = spaces.Box(-1, 1, (3,), np.float32)
OBSERVATIONS: dict[str, dict[str, spaces.Space[Any]]] = {
    "vector": {"speed": VECTOR},
    "image": {"image": PIXELS},
    "dict of both": {"image": PIXELS, "speed": VECTOR},
    "entity list": {"units": spaces.Sequence(ENTITY, stack=True)},
    "graph": {"graph": spaces.Graph(ENTITY, spaces.Box(-1, 1, (2,), np.float32))},
    "clip": {"clip": spaces.Box(0, 255, (2, SIDE, SIDE, 3), np.uint8)},
}
NETWORKS: dict[str, dict[str, Any]] = {
    "feed-forward": {},
    "lstm": {"network.body": "lstm"},
    "conv_lstm": {"network.body": "conv_lstm(channels=2)"},
    "transformer": {"network.net2d": "entity_mlp", "network.body": "transformer_enc(width=8, layers=1, heads=2)"},
}
ACTIONS: dict[str, tuple[spaces.Space[Any], dict[str, Any]]] = {
    "discrete": (spaces.Discrete(3), {}),
    "masked": (spaces.Discrete(3), {}),
    "multi-discrete": (spaces.MultiDiscrete([3, 2]), {}),
    "box": (spaces.Box(-1, 1, (2,), np.float32), {}),
    "mixed": (spaces.Dict({"turn": spaces.Box(-1, 1, (2,), np.float32), "jump": spaces.Discrete(2)}), {}),
    "spatial": (spaces.MultiDiscrete([SIDE, SIDE]), {"agent.heads": ("action=spatial",)}),
    "autoregressive": (
        spaces.Dict({"what": spaces.Discrete(2), "how": spaces.MultiDiscrete([3, 2])}),
        {"agent.autoregressive": ("what", "how"), "agent.arguments": ("what: 1=how",), "agent.head_width": 8},
    ),
    "pointer": (spaces.Discrete(MOST), {}),
}
LISTS = {"entity list": "units", "graph": "graph/nodes"}
AGENTS: dict[str, dict[str, Any]] = {
    "ppo": {"network.shared": "yes", "agent.epochs": 1, "agent.minibatches": 2},
    "a2c": {"network.shared": "no"},
}
FACTORS = [tuple(OBSERVATIONS), tuple(NETWORKS), tuple(ACTIONS), tuple(AGENTS)]


class StructureEnv(gymnasium.Env[Any, Any]):
    """Random observations, rewards and endings; it refuses a wrong action itself."""

    def __init__(self, observation: str, action: str) -> None:
        self.action_space, self.masked = ACTIONS[action][0], action == "masked"
        masks = {"action_mask": spaces.MultiBinary(3)} if self.masked else {}
        self.observation_space = spaces.Dict(OBSERVATIONS[observation] | masks)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        assert not self.masked or self.seen["action_mask"][action]
        draw = self.np_random.random()
        return self._draw(), float(self.np_random.normal()), draw < 0.15, 0.15 <= draw < 0.3, {}

    def _draw(self) -> Any:
        self.seen: dict[str, Any] = {}
        for name, space in self.observation_space.spaces.items():  # type: ignore[attr-defined]
            self.seen[name] = self._sample(space)
        if self.masked:
            self.seen["action_mask"][self.np_random.integers(3)] = 1
        return self.seen

    def _sample(self, space: Any) -> Any:
        """A list of 0 to ``MOST`` entities, a graph of 1 to ``MOST`` nodes and 0 to ``MOST`` edges."""
        if isinstance(space, spaces.Sequence):
            return self.np_random.random((self.np_random.integers(MOST + 1), 3), np.float32)
        if not isinstance(space, spaces.Graph):
            return space.sample()
        nodes, edges = int(self.np_random.integers(1, MOST + 1)), int(self.np_random.integers(MOST + 1))
        return spaces.GraphInstance(
            self.np_random.random((nodes, 3), np.float32),
            self.np_random.random((edges, 2), np.float32),
            self.np_random.integers(0, nodes, (edges, 2)),
        )


def is_possible(choice: Choice) -> bool:
    """Places need a map, pointers a list."""
    observation, _, action, _ = choice
    maps = observation in ("image", "dict of both", "clip")
    return {"spatial": maps, "pointer": observation in LISTS}.get(action, True)


def make_worker(choice: Choice) -> LocalWorker:
    torch.set_num_threads(1)
    observation, network, action, agent = choice
    heads = {"agent.heads": (f"action=pointer({LISTS.get(observation, 'units')})",)} if action == "pointer" else {}
    settings = {
        "env.options": (f"observation='{observation}'", f"action='{action}'"),
        "env.num": 3,
        "agent.rollout": 4,
        "network.hidden": (8,),
        "network.lstm_size": 4,
        **NETWORKS[network],
        **ACTIONS[action][1],
        **heads,
        **AGENTS[agent],
        **({"env.max_length": MOST} if observation in LISTS else {}),
    }
    made = resolve_settings(f"{__name__}:StructureEnv", agent, "none", None, settings).settings
    manager = build_manager(made)
    try:
        learner = build_agent(made, manager.observation, manager.action, torch.device("cpu"))
    except UserError:
        manager.close()
        raise
    manager.set_action_transform(learner.action_transform)
    return LocalWorker(made, learner, manager, LocalUpdater(learner), build_evaluator(made, learner))


def train(choice: Choice) -> None:
    """Two updates that move the networks; before each, learning replays what acting saw."""
    if not is_possible(choice):
        with pytest.raises(UserError, match=r"^[^\n]*(needs a map|agent.heads)[^\n]*$"):
            make_worker(choice)
        return
    worker = make_worker(choice)
    agent: Any = worker.agent
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    try:
        begin(worker, 1)
        for _ in range(2):
            collect(worker)
            batch = worker.cache.read()
            with torch.no_grad():
                terms, _ = agent.evaluate(batch.without_last_observation())
            ratio = (terms["log_prob"] - batch.experience["log_prob"]).exp()
            torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-4)
            learned = agent.learn(batch, worker.updater)
            assert all(torch.isfinite(x) for x in learned.metrics.values()), learned.metrics
        moved = [name for name, p in agent.named_parameters() if not torch.equal(p, before[name])]
        assert any(name.startswith("networks.") for name in moved)
        assert all(p.isfinite().all() for p in agent.parameters())
    finally:
        worker.close()


@pytest.mark.parametrize("choice", pairwise(0, FACTORS), ids=lambda choice: "-".join(map(str, choice)))
def test_every_pair_of_structures_trains_or_is_refused(choice: Choice) -> None:
    train(choice)


@pytest.mark.slow
@pytest.mark.timeout(1_800)  # dozens of runs each
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_the_whole_product_of_structures_trains_or_is_refused(network: str, observation: str) -> None:
    for action, agent in itertools.product(ACTIONS, AGENTS):
        train((observation, network, action, agent))
