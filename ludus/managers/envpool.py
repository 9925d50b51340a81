"""Environments stepped by EnvPool's C++ threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ludus.core.errors import UserError, did_you_mean
from ludus.core.types import State, Tensors
from ludus.environments.config import DEFAULTS, EnvConfig
from ludus.environments.observations import ObservationReader
from ludus.environments.spaces import Layout
from ludus.managers.vector import VectorizedManager

# families of environments in which max_episode_steps changes neither rewards nor observations
LIMITED_HERE = ("classic_control", "toy_text", "box2d", "mujoco_gym")
NO_LIMIT = 2**31 - 1
NOT_LOGGED = ("env_id", "players", "reward", "elapsed_step")  # infos


class EnvPoolManager(VectorizedManager):
    """Steps an EnvPool, which has next-step autoreset.

    A pool takes its seeds when it is created, so ``reset`` creates a new one; later episodes continue with each row's
    generator.

    EnvPool reports an episode that terminates at its time limit as truncated. In the families of ``LIMITED_HERE``, the
    pool's limit is therefore one step longer, and rows are truncated here. Atari pools report in their infos that the
    game is over. Other environments keep EnvPool's flags.
    """

    full_reset = True
    backend = "envpool"

    def __init__(
        self,
        id: str,
        num: int,
        options: Mapping[str, Any] | None = None,
        config: EnvConfig = DEFAULTS,
        branch: int = 0,
        render_mode: str | None = None,
    ) -> None:
        self._envpool = _import()
        self._id = id
        self._pool: Any = None  # created by reset
        limit = {"max_episode_steps": config.max_episode_steps} if config.max_episode_steps else {}
        self._options: dict[str, Any] = {**(options or {}), **limit}
        self._mode = {"render_mode": render_mode} if render_mode else {}
        spec = self._make_spec()
        actions = Layout(spec.gymnasium_action_space, "action", id)
        space, frames = _fix_bounds(spec.gymnasium_observation_space), getattr(spec.config, "stack_num", 1)
        reader = ObservationReader(space, actions.specs, config, {}, id, lambda _: int(frames))
        super().__init__(id, num, reader, actions, branch)
        self._limit = _limit(spec)
        if self._limit:
            self._options["max_episode_steps"] = self._limit + 1
        self._cut = np.zeros(num, np.bool_)  # rows truncated here, which have not ended for the pool
        self._resets: Any = None  # observations and infos of the resets of these rows

    def send(self, actions: Tensors, group: int = 0) -> None:
        """Start the step in the pool's threads."""
        super().send(actions, group)
        arrays = self.layout.unflatten(self._pending[group])
        if not self._cut.any():
            self._pool.send(arrays)
            return
        ids, others = (np.flatnonzero(rows).astype(np.int32) for rows in (self._cut, ~self._cut))
        self._resets = self._pool.reset(ids)
        if len(others):
            self._pool.send(arrays[others], others)

    def render(self, row: int = 0) -> Any:
        """Render one environment."""
        return self._pool.render(row)[0]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def _reset_rows(self) -> None:
        self.close()
        seeds = [self.derive_seed(self.first_row + row, int(self._stats[0].episode[row])) for row in range(self.batch)]
        self._pool = self._envpool.make(
            self._id, env_type="gymnasium", num_envs=self.batch, seed=seeds, **self._mode, **self._options
        )
        self._cut[:] = False
        self._write_reset(*self._pool.reset())

    def _step_rows(self, group: int) -> None:
        observation, reward, terminated, truncated, infos = self._recv()
        if "terminated" in infos:  # Atari pools
            terminated = terminated | (truncated & (infos["terminated"] != 0))
            truncated = truncated & ~terminated
        if self._limit:
            self._cut = (infos["elapsed_step"] >= self._limit) & ~terminated & ~truncated
            truncated = truncated | self._cut
        logged = {key: value for key, value in infos.items() if key not in NOT_LOGGED}
        score = infos.get("reward")  # the game's score in Atari pools, which clip the reward
        self._write_step(observation, reward, terminated, truncated, logged, score)

    def _recv(self) -> Any:
        """Return the step of all rows, including those that were reset."""
        if not self._cut.any():
            return self._pool.recv()
        observation, infos = self._resets
        zeros = np.zeros(np.count_nonzero(self._cut))
        resets = observation, zeros, zeros != 0, zeros != 0, infos
        return resets if self._cut.all() else _merge(self._cut, resets, self._pool.recv())

    def _restore(self, snapshot: State) -> dict[int, str]:
        return self._restart_all("an EnvPool can be neither saved nor replayed")

    def _make_spec(self) -> Any:
        known = self._envpool.list_all_envs()
        if self._id not in known:
            raise UserError(f'EnvPool has no environment "{self._id}".{did_you_mean(self._id, known)}')
        try:
            return self._envpool.make_spec(self._id, **self._options)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f'EnvPool refused the options {sorted(self._options)} of "{self._id}": {error}.') from error


def _limit(spec: Any) -> int:
    """Return the time limit to apply here instead of in the pool; 0: the pool applies it."""
    families = {kind.__module__.removesuffix("_envpool").rpartition(".")[2] for kind in type(spec).__mro__}
    limit = int(spec.config.max_episode_steps)
    return limit if families & set(LIMITED_HERE) and 0 < limit < NO_LIMIT else 0


def _merge(where: NDArray[np.bool_], chosen: Any, others: Any) -> Any:
    """Merge nested arrays: ``chosen`` has the rows ``where``, ``others`` the rest."""
    if isinstance(chosen, Mapping):
        return {key: _merge(where, x, others[key]) for key, x in chosen.items()}
    if isinstance(chosen, tuple):
        return tuple(_merge(where, x, y) for x, y in zip(chosen, others, strict=True))
    merged = np.empty((len(where), *others.shape[1:]), others.dtype)
    merged[where], merged[~where] = chosen, others
    return merged


def _import() -> Any:
    try:
        import envpool
    except ImportError as error:
        raise UserError("env.backend envpool needs EnvPool, which is not installed: pip install envpool.") from error
    return envpool


def _fix_bounds(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Fix the lower bounds of unbounded elements, for which EnvPool has the smallest positive float (LunarLander)."""
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    low = np.where(space.low == np.finfo(space.dtype).tiny, -np.inf, space.low)
    return spaces.Box(low.astype(space.dtype), space.high, dtype=space.dtype.type)
