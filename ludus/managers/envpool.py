"""Environments stepped by EnvPool's C++ threads; the one file that imports envpool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ludus.core.errors import UserError, nearest
from ludus.core.types import State, Tensors
from ludus.environments.infos import numeric_row
from ludus.environments.masks import ObservationReader
from ludus.environments.spaces import Layout
from ludus.managers.base import BatchManager


class EnvPoolManager(BatchManager):
    """Steps an EnvPool, whose rows reset themselves at the step after an ending.

    A pool takes its seeds when it is made, so ``reset`` makes a new one; later episodes go on with each row's
    generator.
    """

    forgets = True

    def __init__(
        self,
        id: str,
        num: int,
        options: Mapping[str, Any] | None = None,
        max_episode_steps: int = 0,
        mask: str = "action_mask",
        branch: int = 0,
        render_mode: str | None = None,
    ) -> None:
        self._envpool = _import()
        self._id = id
        self._pool: Any = None  # made by reset
        limit = {"max_episode_steps": max_episode_steps} if max_episode_steps else {}
        self._options: dict[str, Any] = {**(options or {}), **limit}
        self._mode = {"render_mode": render_mode} if render_mode else {}
        spec = self._make_spec()
        actions = Layout(spec.gymnasium_action_space, "action", id)
        reader = ObservationReader(_honest(spec.gymnasium_observation_space), actions.specs, mask, {}, id)
        reader.tell_stack(getattr(spec.config, "stack_num", 1))
        super().__init__(id, num, reader, actions, branch)

    def send(self, actions: Tensors, group: int = 0) -> None:
        """Start the step; the pool's threads work until ``recv`` asks for it."""
        super().send(actions, group)
        self._pool.send(self._layout.unflatten(self._pending[group]))

    def render(self, row: int = 0) -> Any:
        """The picture of one environment."""
        return self._pool.render(row)[0]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def _begin(self) -> None:
        self.close()
        seeds = [self.seed_of(row, int(self._accounts[0].episode[row])) for row in range(self.batch)]
        self._pool = self._envpool.make(
            self._id, env_type="gymnasium", num_envs=self.batch, seed=seeds, **self._mode, **self._options
        )
        self._take_reset(*self._pool.reset())

    def _advance(self, group: int) -> None:
        self._take(*self._pool.recv())

    def _restore(self, snapshot: State) -> dict[int, str]:
        return self._restart("an EnvPool can be neither saved nor replayed")

    def _raw_reward(self, infos: Mapping[str, Any]) -> NDArray[Any]:
        """Atari pools say the game's own score beside a clipped reward."""
        reward: NDArray[Any] = infos.get("reward", self._memory.reward)
        return reward

    def _row_infos(self, infos: Any, row: int) -> dict[str, float]:
        own = {key: value for key, value in infos.items() if key not in ("env_id", "players", "reward", "elapsed_step")}
        return numeric_row(own, row)

    def _make_spec(self) -> Any:
        known = self._envpool.list_all_envs()
        if self._id not in known:
            raise UserError(f'EnvPool has no environment "{self._id}".{nearest(self._id, known)}')
        try:
            return self._envpool.make_spec(self._id, **self._options)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f'EnvPool refused the options {sorted(self._options)} of "{self._id}": {error}.') from error


def _import() -> Any:
    try:
        import envpool
    except ImportError as error:
        raise UserError(
            'env.backend envpool needs EnvPool, which is not installed: pip install "ludus[envpool]".'
        ) from error
    return envpool


def _honest(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Undo EnvPool's mark of an unbounded element, the smallest positive float as a lower bound (LunarLander)."""
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    low = np.where(space.low == np.finfo(space.dtype).tiny, -np.inf, space.low)
    return spaces.Box(low.astype(space.dtype), space.high, dtype=space.dtype.type)
