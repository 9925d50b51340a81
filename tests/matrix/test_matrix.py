"""Every network with every observation, action, agent, manager and normalizer: it trains and is played, or is refused.

The fast tests cover every pair of choices once; the slow one takes the whole product.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from torch import Tensor, nn

import ludus
from ludus.agents.actor_critic import ActorCritic
from ludus.agents.ppo import PPO
from ludus.core.errors import UserError
from ludus.core.network import Network, Shapes
from ludus.core.types import Batch, HiddenState, Learned, Tensors

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
    "multidiscrete": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "multidiscrete masked": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(3),
    "gaussian": spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, np.inf], np.float32)),
    "tanh": spaces.Box(-2, 5, (2,), np.float32),
    "beta": spaces.Box(0, 3, (1, 2), np.float64),
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


def make_vector(num_envs: int, observation: str, action: str) -> gymnasium.vector.SyncVectorEnv:
    return gymnasium.vector.SyncVectorEnv([lambda: MatrixEnv(observation, action)] * num_envs)


gymnasium.register("Matrix-v0", entry_point=MatrixEnv, vector_entry_point=make_vector)


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
NORMALIZERS = (False, True)
FACTORS: list[tuple[Any, ...]] = [tuple(NETWORKS), tuple(OBSERVATIONS), tuple(ACTIONS), ("ppo", "a2c"), BACKENDS]
FACTORS.append(NORMALIZERS)
Choice = tuple[Any, ...]  # one of each factor


def pairwise(seed: int) -> list[Choice]:
    """Few choices that hold every pair of values of two factors: greedily, the best of some random ones each time."""
    rng = random.Random(seed)
    open_pairs = set().union(*(_pairs(choice) for choice in itertools.product(*FACTORS)))
    chosen: list[Choice] = []
    while open_pairs:
        start = dict(min(open_pairs, key=repr))
        drawn = [tuple(start.get(i, rng.choice(values)) for i, values in enumerate(FACTORS)) for _ in range(60)]
        best = max(drawn, key=lambda choice: len(_pairs(choice) & open_pairs))
        open_pairs -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(choice: Choice) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(itertools.combinations(enumerate(choice), 2))


def settings_of(choice: Choice, folder: Path) -> tuple[str, str, dict[str, Any]]:
    """Environment, agent and settings of a tiny run of two updates and one evaluation."""
    network, observation, action, agent, backend, normalized = choice
    settings: dict[str, Any] = {
        "runs": str(folder),
        "quiet": True,
        "threads": 1,
        "evaluation.episodes": 2,
        "evaluation.every": 0,
        "env.num": 3,
        "env.options": (f"observation='{observation}'", f"action='{action}'"),
        "env.backend": "auto" if backend == "simple" else backend,
        "agent.rollout": 6,
        "agent.normalize_observation": normalized,
        "agent.normalize_reward": normalized,
        "network.hidden": (8,),
        "network.lstm_size": 4,
    }
    if action in ("tanh", "beta"):
        settings["agent.distribution"] = action
    if agent == "ppo":
        settings |= {"agent.epochs": 2, "agent.minibatches": 2}
    environment = f"{__name__}:MatrixEnv" if backend == "simple" else "Matrix-v0"
    return environment, agent, settings | NETWORKS[network]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Checks before every learning that it replays what acting saw; counts the learnings."""
    seen: list[int] = []
    for kind in (ActorCritic, PPO):

        def checked(self: Any, batch: Batch, updater: Any, learn: Any = kind.learn) -> Learned:
            seen.append(1)
            with torch.no_grad():
                terms, value = self.evaluate(batch.without_successor())
            ratio = (terms["log_prob"] - batch.experience["log_prob"]).exp()
            torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
            torch.testing.assert_close(value, batch.experience["value"], rtol=1e-4, atol=1e-5)
            learned: Learned = learn(self, batch, updater)
            assert all(torch.isfinite(x) for x in learned.metrics.values()), learned.metrics
            return learned

        monkeypatch.setattr(kind, "learn", checked)
    return seen


def train_and_play(choice: Choice, folder: Path, replayed: list[int]) -> None:
    """Two updates, an evaluation, a saved run; then its policy on single observations and on a batch."""
    environment, agent, settings = settings_of(choice, folder)
    result = ludus.train(
        environment, agent, nb_step=19, preset="none", settings=settings
    )  # one update makes 18 at most
    assert len(replayed) >= 2
    assert result.evaluation is not None
    assert len(result.evaluation.returns) == 2
    play(ludus.load(result.run), MatrixEnv(choice[1], choice[2]))


def play(player: Any, env: MatrixEnv) -> None:
    """Step by step, where the environment itself refuses a wrong action; then three observations at once."""
    observation, info = env.reset(seed=1)
    player.reset()
    seen: list[tuple[Any, Any]] = []
    for greedy in (True, True, False):
        seen.append((observation, env.mask))
        observation, _, terminated, truncated, info = env.step(player.act(observation, info, greedy=greedy))
        if terminated or truncated:
            observation, info = env.reset()
            player.reset()
    observations, masks = zip(*seen, strict=True)
    actions = player.act(stack(env.observation_space, observations), batch_info(env, masks), greedy=False)
    rows = list(iterate(batch_space(env.action_space, 3), actions))
    assert len(rows) == 3
    for action, mask in zip(rows, masks, strict=True):
        assert env.action_space.contains(action), action
        assert mask is None or allowed(env.kind, action, mask), (action, mask)


def stack(space: spaces.Space[Any], values: tuple[Any, ...]) -> Any:
    return concatenate(space, values, create_empty_array(space, len(values)))


def batch_info(env: MatrixEnv, masks: tuple[Any, ...]) -> dict[str, Any]:
    return {"action_mask": stack(MASKS[env.kind], masks)} if env.masked and env.in_info else {}


@pytest.mark.parametrize("choice", pairwise(0), ids=lambda choice: "-".join(map(str, choice)))
def test_every_pair_of_choices_trains_and_plays(choice: Choice, tmp_path: Path, replayed: list[int]) -> None:
    train_and_play(choice, tmp_path, replayed)


POOLS = [
    *(("CartPole-v1", network) for network in NETWORKS),
    *(("Pendulum-v1", network) for network in ("separate", "lstm body")),
    *(("Pong-v5", network) for network in ("shared", "lstm body")),  # a pool of Atari games takes a second to make
]


@pytest.mark.parametrize(("environment", "network"), POOLS)
def test_networks_train_on_envpool(environment: str, network: str, tmp_path: Path, replayed: list[int]) -> None:
    pytest.importorskip("envpool")
    odd = len(network) % 2 == 1  # both agents and both normalizers in turn
    _, agent, settings = settings_of((network, "", "", "ppo" if odd else "a2c", "envpool", odd), tmp_path)
    settings |= {"env.options": (), "env.max_episode_steps": 9, "agent.distribution": "beta"}
    result = ludus.train(environment, agent, nb_step=19, preset="none", settings=settings)
    assert len(replayed) >= 2
    player = ludus.load(result.run)
    world = player.environment()
    first = world.reset(0).observation["observation"].numpy()  # [1, …]
    batch, single = player.act(first), player.act(first[0])
    assert np.shape(single) == np.shape(batch)[1:]
    world.close()


BOX = spaces.Box(-1, 1, (2,), np.float32)
REFUSED_OBSERVATIONS: dict[str, tuple[spaces.Space[Any], str]] = {
    "text": (spaces.Text(3), "is a Text"),
    "sequence": (spaces.Dict({"a": spaces.Sequence(BOX)}), '"a" is a Sequence'),
    "five ranks": (spaces.Box(-1, 1, (1, 2, 1, 2, 1), np.float32), "ranks 0 to 4"),
    "small image": (spaces.Box(0, 255, (35, 36, 3), np.uint8), "at least 36×36, but one is 35×36"),
    "one name twice": (spaces.Dict({"a/b": BOX, "a": spaces.Dict({"b": BOX})}), 'both called "a/b"'),
}
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "own environment, vector": ("vector", "discrete", {"env.backend": "vector"}, "env.backend is vector"),
    "own environment, envpool": ("vector", "discrete", {"env.backend": "envpool"}, "env.backend is envpool"),
    "tanh without bounds": ("vector", "gaussian", {"agent.distribution": "tanh"}, "finite bounds"),
    "beta without bounds": ("vector", "gaussian", {"agent.distribution": "beta"}, "finite bounds"),
    "few columns": ("vector", "discrete", {"network.body": "lstm", "agent.minibatches": 4}, "the 3 environments"),
    "few rows": ("vector", "discrete", {"agent.minibatches": 19}, "the 18 transitions"),
    "compiled lstm": ("vector", "discrete", {"network.body": "lstm", "compile": "on"}, "compile is on"),
    "wrong rank": ("vector", "discrete", {"network.net1d": "nature_cnn"}, "rank 3: give a piece of rank 1"),
    "no such piece": ("vector", "discrete", {"network.body": "lstn"}, 'Did you mean "lstm"'),
    "no such network": ("vector", "discrete", {"network.name": "modula"}, 'Did you mean "modular"'),
    "no such agent part": ("vector", "discrete", {"agent.rolout": 3}, 'Did you mean "agent.rollout"'),
    "no such option": ("vector", "discrete", {"env.options": ("obs=1",)}, 'no option "obs"'),
}


@pytest.mark.parametrize("name", REFUSED_OBSERVATIONS)
def test_an_observation_that_no_network_takes_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, said = REFUSED_OBSERVATIONS[name]
    monkeypatch.setitem(OBSERVATIONS, name, space)
    assert_refused(("separate", name, "discrete", "ppo", "simple", False), {}, said, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_together_are_refused(name: str, tmp_path: Path) -> None:
    observation, action, changes, said = REFUSED[name]
    assert_refused(("separate", observation, action, "ppo", "simple", False), changes, said, tmp_path)


def assert_refused(choice: Choice, changes: dict[str, Any], said: str, folder: Path) -> None:
    """One line, and no run folder is left behind."""
    environment, agent, settings = settings_of(choice, folder)
    with pytest.raises(UserError, match=r"^[^\n]+$") as caught:
        ludus.train(environment, agent, nb_step=19, preset="none", settings=settings | changes)
    assert said in str(caught.value)
    assert not any(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_the_whole_product_trains_and_plays(
    network: str, observation: str, tmp_path: Path, replayed: list[int]
) -> None:
    for rest in itertools.product(*FACTORS[2:]):
        replayed.clear()
        train_and_play((network, observation, *rest), tmp_path, replayed)
