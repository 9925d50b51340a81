"""Environments that step as a batch, and Gymnasium's native vector environments, which do so in a few numpy calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.environments.config import DEFAULTS, EnvConfig
from ludus.environments.errors import environment_error
from ludus.environments.infos import numeric_info_row
from ludus.environments.observations import ObservationReader
from ludus.environments.snapshot import restore_snapshot, take_snapshot
from ludus.environments.spaces import Arrays, Layout
from ludus.managers.base import BatchManager


class VectorizedManager(BatchManager):
    """The part of managers whose environments step as a batch."""

    _env: Any  # the environments

    def _call_env(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the environments; an exception names the environment and the user's code."""
        try:
            return getattr(self._env, method)(*args, **kwargs)
        except Exception as error:
            raise environment_error(self.name, method, error) from error

    def batch_seed(self, number: int) -> int:
        """Return the seed of the given reset, for environments with one generator for all rows."""
        return self.derive_seed(self.first_row, number) if self.first_row else self.derive_seed(number)

    def _restart_all(self, reason: str) -> dict[int, str]:
        """Start the next episode in every row; the result of ``_restore`` if no episode can be restored."""
        for stats in self._stats:
            stats.start_next(slice(None))
        self._memory.mark_first()
        self._reset_rows()
        return dict.fromkeys(range(self.batch), reason)

    def _write_reset(self, observation: Any, infos: Mapping[str, Any]) -> None:
        """Write a reset, and check that it matches the spaces."""
        arrays = self.reader.read(observation, infos, (self.batch,))
        for name, x in arrays.items():
            target = self._memory.observation[name]
            if x.shape != target.shape or not np.can_cast(x.dtype, target.dtype, "same_kind"):
                raise UserError(
                    f'{self.name}: observation "{name}" is {x.dtype} of shape {x.shape}, but its space says '
                    f"{target.dtype} of shape {target.shape}; fix the space or the observation."
                )
        self._write_observation(arrays)

    def _write_step(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any, infos: dict[str, Any], score: Any = None
    ) -> None:
        """Write a step; ``score`` is summed to the returns of episodes, if that is not the reward."""
        memory, stats, first = self._memory, self._stats[0], self._memory.first
        memory.reward[...] = reward
        memory.terminated[...] = terminated
        memory.truncated[...] = truncated
        first[...] = stats.ended
        if 1 in first.tobytes():  # much faster than any()
            memory.reward[first], memory.terminated[first], memory.truncated[first] = 0, False, False
        score = memory.reward if score is None else score
        self._finished += stats.add(score, lambda row: numeric_info_row(infos, row))
        self._write_observation(self.reader.read(observation, infos, (self.batch,)))

    def _write_observation(self, arrays: Arrays) -> None:
        self.reader.check(arrays, self._stats[0].ended)  # before choices are cast to smaller integers
        for name, x in arrays.items():
            self._memory.observation[name][...] = x


class VectorEnvManager(VectorizedManager):
    """Steps a Gymnasium VectorEnv with next-step autoreset; it has one generator, so episodes have no seeds."""

    full_reset = True
    backend = "vector"

    def __init__(self, env: VectorEnv[Any, Any, Any], name: str, config: EnvConfig = DEFAULTS, branch: int = 0) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            found = f'"{mode.value}"' if isinstance(mode, AutoresetMode) else repr(mode)
            raise UserError(
                f"{name}: its vector environment has the autoreset mode {found}, but a row must be reset at the step "
                "after its ending; use its next-step mode, or env.backend simple."
            )
        self._env = env
        # environments check all actions, which takes a fifth of a step; actions of a policy are always valid
        env.action_space.contains = lambda action: True  # type: ignore[assignment, method-assign]
        actions = Layout(env.single_action_space, "action", name)
        _, infos = env.reset(seed=0)
        reader = ObservationReader(env.single_observation_space, actions.specs, config, infos, name)
        super().__init__(name, env.num_envs, reader, actions, branch)

    def close(self) -> None:
        self._env.close()

    def _reset_rows(self) -> None:
        seed = self.batch_seed(int(self._stats[0].episode.sum()))
        self._write_reset(*self._call_env("reset", seed=seed))

    def _step_rows(self, group: int) -> None:
        self._write_step(*self._call_env("step", self.layout.unflatten(self._pending[group])))

    def _snapshot(self) -> State:
        return {"vector": take_snapshot(self._env)}

    def _restore(self, snapshot: State) -> dict[int, str]:
        if snapshot["vector"] is None:
            return self._restart_all("the state of its vector environment cannot be saved")
        try:
            restore_snapshot(self._env, snapshot["vector"])
        except UserError as error:
            return self._restart_all(f"it cannot be restored ({str(error).rstrip('.')})")
        return {}
