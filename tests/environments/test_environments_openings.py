"""Episodes that begin with random actions."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.core.errors import UserError
from ludus.environments.agents_toy import Nim
from ludus.environments.config import EnvConfig
from ludus.environments.gym import make_environment
from ludus.environments.openings import RandomOpening

NIM = "ludus.environments.agents_toy:Nim"
WRAPPER = "ludus.environments.openings:RandomOpening"


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
