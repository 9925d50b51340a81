"""Environments stepped by EnvPool's C++ threads; the one file that imports envpool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ludus.core.errors import UserError, did_you_mean
from ludus.core.types import State, Tensors
from ludus.environments.infos import numeric_info_row
from ludus.environments.masks import ObservationReader
from ludus.environments.spaces import Layout
from ludus.managers.base import BatchManager

# kinds of environments in which max_episode_steps changes neither rewards nor observations
TIME_LIMITS = ("classic_control", "toy_text", "box2d", "mujoco_gym")
NO_LIMIT = 2**31 - 1


class EnvPoolManager(BatchManager):
    """Steps an EnvPool, whose rows reset themselves at the step after an ending.

    A pool takes its seeds when it is made, so ``reset`` makes a new one; later episodes go on with each row's
    generator.

    EnvPool calls an episode that terminates on the step of its time limit truncated. Where the limit does nothing but
    end an episode (``TIME_LIMITS``), the pool therefore gets a limit of one step more, and rows are cut here; Atari
    pools say in their infos that the game is over; elsewhere it stays as EnvPool says.
    """

    full_reset = True
    backend = "envpool"

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
        reader.mark_frame_stack(getattr(spec.config, "stack_num", 1))
        super().__init__(id, num, reader, actions, branch)
        self._limit = _limit(spec)
        if self._limit:
            self._options["max_episode_steps"] = self._limit + 1
        self._cut = np.zeros(num, np.bool_)  # rows at their time limit: the pool does not know that they have ended
        self._begun: Any = None  # what these rows' resets gave

    def send(self, actions: Tensors, group: int = 0) -> None:
        """Start the step; the pool's threads work until ``recv`` asks for it."""
        super().send(actions, group)
        arrays = self._layout.unflatten(self._pending[group])
        if not self._cut.any():
            self._pool.send(arrays)
            return
        ids, others = _numbers(self._cut), _numbers(~self._cut)
        self._begun = self._pool.reset(ids)
        if len(others):
            self._pool.send(arrays[others], others)

    def render(self, row: int = 0) -> Any:
        """The picture of one environment."""
        return self._pool.render(row)[0]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def _begin(self) -> None:
        self.close()
        seeds = [self.seed_of(self.first_row + row, int(self._accounts[0].episode[row])) for row in range(self.batch)]
        self._pool = self._envpool.make(
            self._id, env_type="gymnasium", num_envs=self.batch, seed=seeds, **self._mode, **self._options
        )
        self._cut[:] = False
        self._take_reset(*self._pool.reset())

    def _advance(self, group: int) -> None:
        observation, reward, terminated, truncated, infos = self._recv()
        if "terminated" in infos:  # of Atari pools
            terminated = terminated | (truncated & (infos["terminated"] != 0))
            truncated = truncated & ~terminated
        if self._limit:
            self._cut = (infos["elapsed_step"] >= self._limit) & ~terminated & ~truncated
            truncated = truncated | self._cut
        self._take(observation, reward, terminated, truncated, infos)

    def _recv(self) -> Any:
        """The step of all rows, those that were reset among them."""
        if not self._cut.any():
            return self._pool.recv()
        observation, infos = self._begun
        none = np.zeros(np.count_nonzero(self._cut))
        begun = observation, none, none != 0, none != 0, infos
        return begun if self._cut.all() else _joined(self._cut, begun, self._pool.recv())

    def _restore(self, snapshot: State) -> dict[int, str]:
        return self._restart("an EnvPool can be neither saved nor replayed")

    def _raw_reward(self, infos: Mapping[str, Any]) -> NDArray[Any]:
        """Atari pools say the game's own score beside a clipped reward."""
        reward: NDArray[Any] = infos.get("reward", self._memory.reward)
        return reward

    def _row_infos(self, infos: Any, row: int) -> dict[str, float]:
        own = {key: value for key, value in infos.items() if key not in ("env_id", "players", "reward", "elapsed_step")}
        return numeric_info_row(own, row)

    def _make_spec(self) -> Any:
        known = self._envpool.list_all_envs()
        if self._id not in known:
            raise UserError(f'EnvPool has no environment "{self._id}".{did_you_mean(self._id, known)}')
        try:
            return self._envpool.make_spec(self._id, **self._options)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f'EnvPool refused the options {sorted(self._options)} of "{self._id}": {error}.') from error


def _limit(spec: Any) -> int:
    """The time limit to keep here instead of in the pool; 0: the pool keeps it."""
    kinds = {kind.__module__.removesuffix("_envpool").rpartition(".")[2] for kind in type(spec).__mro__}
    limit = int(spec.config.max_episode_steps)
    return limit if kinds & set(TIME_LIMITS) and 0 < limit < NO_LIMIT else 0


def _numbers(rows: NDArray[np.bool_]) -> NDArray[np.int32]:
    return np.flatnonzero(rows).astype(np.int32)


def _joined(where: NDArray[np.bool_], chosen: Any, others: Any) -> Any:
    """Two nests of arrays as one: ``chosen`` has the rows ``where``, ``others`` the rest."""
    if isinstance(chosen, Mapping):
        return {key: _joined(where, x, others[key]) for key, x in chosen.items()}
    if isinstance(chosen, tuple):
        return tuple(_joined(where, x, y) for x, y in zip(chosen, others, strict=True))
    joined = np.empty((len(where), *others.shape[1:]), others.dtype)
    joined[where], joined[~where] = chosen, others
    return joined


def _import() -> Any:
    try:
        import envpool
    except ImportError as error:
        raise UserError("env.backend envpool needs EnvPool, which is not installed: pip install envpool.") from error
    return envpool


def _honest(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Undo EnvPool's mark of an unbounded element, the smallest positive float as a lower bound (LunarLander)."""
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    low = np.where(space.low == np.finfo(space.dtype).tiny, -np.inf, space.low)
    return spaces.Box(low.astype(space.dtype), space.high, dtype=space.dtype.type)
