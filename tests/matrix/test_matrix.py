"""Every network with every observation, action, agent, manager and normalizer: it trains and is played, or is refused.

The fast tests cover every pair of choices once; the slow one takes the whole product.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from matrix_parts import (
    ACTIONS,
    FACTORS,
    MASKS,
    NETWORKS,
    OBSERVATIONS,
    Choice,
    MatrixEnv,
    allowed,
    common,
    environment_of,
    pairwise,
    refusal,
    settings_of,
)

import ludus
from ludus.agents.actor_critic import ActorCritic
from ludus.agents.ppo import PPO
from ludus.agents.reinforce import REINFORCE
from ludus.agents.trpo import TRPO
from ludus.core.batch import Batch, Learned


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Checks before every learning that it replays what acting saw; counts the learnings."""
    seen: list[int] = []
    for kind in (ActorCritic, PPO, TRPO):

        def checked(self: Any, batch: Batch, updater: Any, learn: Any = kind.learn) -> Learned:
            seen.append(1)
            with torch.no_grad():
                terms, value = self.evaluate(batch.without_last_observation())
            real = batch.real if isinstance(self, REINFORCE) else torch.ones_like(batch.real)  # has other padding
            ratio = (terms["log_prob"] - batch.experience["log_prob"]).exp()[real]
            torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
            if not isinstance(self, REINFORCE):
                with torch.no_grad():
                    learned_from = self._values(batch)[:-1]
                torch.testing.assert_close(value, learned_from, rtol=1e-4, atol=1e-5)
            learned: Learned = learn(self, batch, updater)
            assert all(torch.isfinite(x) for x in learned.metrics.values()), learned.metrics
            return learned

        monkeypatch.setattr(kind, "learn", checked)
    return seen


def train_and_play(choice: Choice, folder: Path, replayed: list[int]) -> None:
    """Two updates, an evaluation, a saved run; then its policy on single observations and on a batch."""
    environment, agent, settings = settings_of(choice, folder)
    nb_step = 600 if agent == "reinforce" else 19  # one update makes 18 at most; whole episodes may be longer
    result = ludus.train(environment, agent, nb_step=nb_step, preset="none", settings=settings)
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
    empty: Any = create_empty_array(space, len(values))
    return concatenate(space, values, empty)


def batch_info(env: MatrixEnv, masks: tuple[Any, ...]) -> dict[str, Any]:
    return {"action_mask": stack(MASKS[env.kind], masks)} if env.masked and env.in_info else {}


@pytest.mark.parametrize("choice", pairwise(0), ids=lambda choice: "-".join(map(str, choice)))
def test_every_pair_of_choices_trains_and_plays(choice: Choice, tmp_path: Path, replayed: list[int]) -> None:
    train_and_play(choice, tmp_path, replayed)


@pytest.mark.parametrize("action", ACTIONS)
def test_random_search_trains_and_plays(action: str, tmp_path: Path) -> None:
    """Every kind of action, each with one of the observations in turn."""
    names = list(OBSERVATIONS)
    observation = names[list(ACTIONS).index(action) % len(names)]
    settings = common(observation, action, "simple", tmp_path) | {"env.num": 4}
    updates: list[float] = []
    environment, hook = environment_of("simple"), lambda values: updates.append(values["updates"])
    result = ludus.train(environment, "ars", nb_step=200, preset="none", settings=settings, on_update=hook)
    assert updates[-1] >= 2
    play(ludus.load(result.run), MatrixEnv(observation, action))


POOLS = [
    *(("CartPole-v1", network) for network in NETWORKS),
    *(("Pendulum-v1", network) for network in ("separate", "lstm body")),
    ("Pong-v5", "lstm body"),  # a pool of Atari games takes a second to make
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
    "five ranks": (spaces.Box(-1, 1, (1, 2, 1, 2, 1), np.float32), "ranks 0 to 4"),
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
    "wrong rank": ("vector", "discrete", {"network.net1d": "nature_cnn"}, "rank 3: choose a piece of rank 1"),
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
    environment, agent, settings = settings_of(choice, folder)
    refusal(environment, agent, settings | changes, said, folder)


@pytest.mark.parametrize(
    "environment",
    [
        "matrix_parts:TupleMasks",
        "TupleMasks-v0",
    ],
)
def test_masks_nested_in_tuples_are_kept_to(environment: str, tmp_path: Path, replayed: list[int]) -> None:
    """The environment itself refuses what it masked; a vector environment's infos hold tuples as object arrays."""
    _, agent, settings = settings_of(("separate", "vector", "mixed masked", "ppo", "simple", False), tmp_path)
    settings |= {"env.options": (), "env.backend": "auto" if ":" in environment else "vector"}
    ludus.train(environment, agent, nb_step=40, preset="none", settings=settings)


@pytest.mark.slow
@pytest.mark.timeout(1_800)  # dozens of runs each
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_the_whole_product_trains_and_plays(
    network: str, observation: str, tmp_path: Path, replayed: list[int]
) -> None:
    for rest in itertools.product(*FACTORS[2:]):
        replayed.clear()
        train_and_play((network, observation, *rest), tmp_path, replayed)
