"""Gymnasium's native vector environments, which step all rows in a few numpy calls."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv

from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.environments.config import DEFAULTS, EnvConfig
from ludus.environments.masks import ObservationReader
from ludus.environments.snapshot import restore_snapshot, take_snapshot
from ludus.environments.spaces import Layout
from ludus.managers.base import BatchManager


class VectorEnvManager(BatchManager):
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
