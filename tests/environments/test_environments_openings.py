"""Episodes that begin with random actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from ludus.core.errors import UserError
from ludus.environments.agents_toy import Nim
from ludus.environments.config import EnvConfig
from ludus.environments.gym import make_environment
from ludus.environments.openings import RandomOpening, _to_sample

NIM = "ludus.environments.agents_toy:Nim"
WRAPPER = "ludus.environments.openings:RandomOpening"


class Paid:
    """Six moves in turn, each of which pays 1 to both; one player's masks are bool, the other one's move is a Box."""

    possible_agents = ("chooser", "pusher")

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(0, 6, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3) if agent == "chooser" else spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.moves = 0
        return self._observe()

    def step(self, actions: Any) -> Any:
        assert actions["chooser"] == 2
        self.moves += 1
        observations, infos = self._observe()
        over = dict.fromkeys(self.possible_agents, self.moves == 6)
        return observations, dict.fromkeys(observations, 1.0), over, dict.fromkeys(over, False), infos

    def _observe(self) -> Any:
        masks: dict[str, Any] = {"chooser": {"action_mask": np.array([False, False, True])}, "pusher": {}}
        return {agent: np.full(1, self.moves, np.float32) for agent in self.possible_agents}, masks


def test_rewards_of_the_opening_do_not_count_and_any_mask_holds() -> None:
    env = make_environment(EnvConfig(id="paid", wrappers=(f"{WRAPPER}(most=3)",)), Paid)
    begun = set()
    for seed in range(20):
        observation, info = env.reset(seed=seed)
        moves, over = int(observation["chooser"]["observation"][0]), False
        begun.add(moves)
        while not over:
            _, _, over, _, info = env.step({"chooser": 2, "pusher": np.zeros(2, np.float32)})
        assert info["return"] == {"chooser": 6 - moves, "pusher": 6 - moves}
    assert begun == {0, 1, 2, 3}


@pytest.mark.parametrize("mask", [(np.array([True, False]), [0, 0, 1]), np.array([1, 0, 0, 0, 1])])
def test_masks_of_several_choices(mask: Any) -> None:
    space = spaces.Dict({"a": spaces.MultiDiscrete([2, 3]), "b": spaces.Tuple([spaces.Discrete(2)] * 2)})
    given = _to_sample({"a": mask, "b": (None, np.array([False, True]))}, space)
    for _ in range(10):
        action = space.sample(given)
        assert action["a"].tolist() == [0, 2]
        assert action["b"][1] == 1


def opened(most: int, sticks: int = 9) -> Any:
    return make_environment(EnvConfig(id=NIM, options=(f"sticks={sticks}",), wrappers=(f"{WRAPPER}(most={most})",)))


def nim(env: Any) -> Nim:
    game: Nim = env.unwrapped.env
    return game


def test_a_game_begins_after_random_moves_that_the_masks_allow() -> None:
    plain, env = opened(0), opened(3)
    taken = set()
    for seed in range(40):  # Nim refuses what its mask forbids
        plain.reset(seed=seed)
        observation, _ = env.reset(seed=seed)
        taken.add(nim(plain)._left - nim(env)._left)
        assert nim(env)._left > 0
        assert observation["reward"]["player_0"] == 0
        mover = f"player_{nim(env)._turn}"
        assert observation[mover]["observation"][-1] == 1
    assert {0, 1, 2, 3, 4} <= taken


def test_the_seed_decides_the_opening() -> None:
    first, second = opened(3), opened(3)
    for seed in range(10):
        assert first.reset(seed=seed)[0]["player_0"]["observation"].tolist() == (
            second.reset(seed=seed)[0]["player_0"]["observation"].tolist()
        )


def test_a_game_that_ends_in_its_opening_is_begun_again() -> None:
    env = opened(2, sticks=1)
    for seed in range(10):
        env.reset(seed=seed)
        assert nim(env)._left == 1


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(UserError, match="RandomOpening has most=-1; give the most actions, 0 or more"):
        RandomOpening(opened(0), most=-1)
