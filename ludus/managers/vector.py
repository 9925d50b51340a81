"""Gymnasium's native vector environments, which step all rows in a few numpy calls."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv

from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.environments.errors import environment_error
from ludus.environments.masks import ObservationReader
from ludus.environments.snapshot import restore_snapshot, take_snapshot
from ludus.environments.spaces import Layout
from ludus.managers.base import BatchManager


class VectorEnvManager(BatchManager):
    """Steps a Gymnasium VectorEnv that resets its rows at the step after an ending.

    Such environments have one generator for all rows, so an episode has no seed of its own.
    """

    full_reset = True
    backend = "vector"

    def __init__(self, env: VectorEnv[Any, Any, Any], name: str, mask: str = "action_mask", branch: int = 0) -> None:
        _check_autoreset(env, name)
        self._env = env
        env.action_space.contains = _always  # type: ignore[assignment, method-assign]
        self._closed = False
        actions = Layout(env.single_action_space, "action", name)
        _, infos = env.reset(seed=0)
        reader = ObservationReader(env.single_observation_space, actions.specs, mask, infos, name)
        super().__init__(name, env.num_envs, reader, actions, branch)

    def close(self) -> None:
        if not self._closed:
            self._env.close()
        self._closed = True

    def _begin(self) -> None:
        seed = self.batch_seed(int(self._accounts[0].episode.sum()))
        try:
            result = self._env.reset(seed=seed)
        except Exception as error:
            raise environment_error(self.name, "reset", error) from error
        self._take_reset(*result)

    def _advance(self, group: int) -> None:
        actions = self._layout.unflatten(self._pending[group])
        try:
            result = self._env.step(actions)
        except Exception as error:
            raise environment_error(self.name, "step", error) from error
        self._take(*result)

    def _snapshot(self) -> State:
        return {"vector": take_snapshot(self._env)}

    def _restore(self, snapshot: State) -> dict[int, str]:
        if snapshot["vector"] is None:
            return self._restart("its vector environment has no snapshot of its state")
        try:
            restore_snapshot(self._env, snapshot["vector"])
        except UserError as error:
            return self._restart(f"it cannot be restored ({str(error).rstrip('.')})")
        return {}


def _always(action: Any) -> bool:
    """Native environments check every batch of actions, which takes a fifth of a step; a policy's are valid as made."""
    return True


def _check_autoreset(env: VectorEnv[Any, Any, Any], name: str) -> None:
    mode = env.metadata.get("autoreset_mode")
    if mode == AutoresetMode.NEXT_STEP:
        return
    said = f'"{mode.value}"' if isinstance(mode, AutoresetMode) else repr(mode)
    raise UserError(
        f"{name}: its vector environment has the autoreset mode {said}, but a row must be reset at the step after its "
        "ending; use its next-step mode, or env.backend simple."
    )
