"""Environments in this process, stepped one after the other: the plainest manager, and the one that renders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.environments.failure import failed
from ludus.environments.findings import in_observation
from ludus.environments.gym import Environment
from ludus.environments.masks import ObservationReader
from ludus.environments.spaces import Layout
from ludus.managers.base import BatchManager
from ludus.managers.infos import numeric


class SimpleEnvManager(BatchManager):
    """Steps Gymnasium environments in a loop; each episode has a seed of its own, from (seed, row, episode)."""

    def __init__(
        self, make: Callable[[], Environment], num: int, name: str, mask: str = "action_mask", branch: int = 0
    ) -> None:
        self.name = name
        self._envs = [make() for _ in range(num)]
        space = self._envs[0].observation_space
        actions = Layout(self._envs[0].action_space, "action", name)
        observation, info = self._reset_env(0, seed=0)
        super().__init__(name, num, ObservationReader(space, actions.specs, mask, info, name), actions, branch)
        self._dtypes = {key: leaf.dtype for key, leaf in self._reader.layout.leaves.items()}
        self._sizes = {
            key: np.reshape(spec.sizes, spec.shape)
            for key, spec in self._reader.layout.specs.items()
            if spec.kind == "categorical"
        }
        self._infos: list[dict[str, Any]] = [info for _ in range(num)]
        self._look_at_first(observation)

    def render(self, row: int = 0) -> Any:
        """The picture of one environment, as its render mode gives it."""
        try:
            return self._envs[row].render()
        except Exception as error:
            raise failed(self.name, "render", error) from error

    def close(self) -> None:
        envs, self._envs = self._envs, []
        with ExitStack() as stack:  # one that fails does not keep the others from closing
            for env in envs:
                stack.callback(env.close)

    def state_dict(self) -> State:
        return {**super().state_dict(), "seeds": list(self._seeds)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._seeds = [int(seed) for seed in state["seeds"]]

    def _begin(self) -> None:
        for row in range(self.batch):
            self._begin_row(row, int(self._episode[row]))
        self._check_choices(self._memory.observation)
        self._settle_masks()

    def _begin_row(self, row: int, episode: int) -> None:
        seed = self._seeds[row] = self.seed_of(row, episode)
        observation, self._infos[row] = self._reset_env(row, seed)
        self._write(row, observation)

    def _reset_env(self, row: int, seed: int) -> tuple[Any, dict[str, Any]]:
        try:
            result = self._envs[row].reset(seed=seed)
        except Exception as error:
            raise failed(self.name, "reset", error) from error
        return _unpack_reset(result, self.name)

    def _look_at_first(self, observation: Any) -> None:
        """Refuse, before training begins, what a reset shows to be wrong."""
        self._write(0, observation)
        first = {key: x[:1] for key, x in self._memory.observation.items()}
        for key, x in first.items():
            if not np.isfinite(x).all():
                raise UserError(
                    f'{self.name}: observation "{key}" of the first reset has NaN or infinite values; find the '
                    "division by zero or the overflow that made it so."
                )
        self._check_choices(first)
        if self._reader.masks is not None:
            self._reader.masks.settle(first, np.zeros(1, np.bool_))

    def _advance(self) -> None:
        memory, actions = self._memory, self._pending
        memory.first[...] = self._ended
        for row, begins in enumerate(self._ended.tolist()):
            if begins:
                self._begin_row(row, int(self._episode[row]) + 1)
                memory.reward[row], memory.terminated[row], memory.truncated[row] = 0, False, False
            else:
                self._step_row(row, self._layout.unflatten_row(actions, row))
        self._check_choices(memory.observation)
        self._account(self._infos, memory.reward)
        self._settle_masks()

    def _step_row(self, row: int, action: Any) -> None:
        memory = self._memory
        try:
            result = self._envs[row].step(action)
        except Exception as error:
            raise failed(self.name, "step", error) from error
        try:
            observation, reward, terminated, truncated, info = result
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self.name}: step returned {_count(result)}, but Gymnasium's step returns 5 values: observation, "
                "reward, terminated, truncated, info."
            ) from error
        if not isinstance(info, dict):
            raise UserError(f"{self.name}: step returned {info!r} as info; return a dict, which may be empty.")
        self._infos[row] = info
        self._write(row, observation)
        try:
            memory.reward[row] = reward.__float__()  # float() would read a text, and numpy would take None for NaN
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{self.name}: the reward is {reward!r}, which is not a number; return a float.") from error
        try:
            memory.terminated[row], memory.truncated[row] = bool(terminated), bool(truncated)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self.name}: terminated is {terminated!r} and truncated {truncated!r}; return two bools."
            ) from error

    def _write(self, row: int, observation: Any) -> None:
        try:
            arrays = self._reader.read(observation, self._infos[row])
        except (KeyError, IndexError, TypeError) as error:
            what = f"the observation lacks {error} of its observation space"
            if not isinstance(error, KeyError):
                what = next((p.what[:-1] for p in in_observation(self._reader.layout.space, observation)), what)
            raise UserError(f"{self.name}: {what}; return all its parts.") from error
        for key, value in arrays.items():
            target, wanted = self._memory.observation[key], self._dtypes.get(key)
            if value.shape != target.shape[1:] or (wanted is not None and value.dtype != wanted):
                self._check(key, value, observation)
            target[row] = value

    def _check(self, key: str, value: NDArray[Any], observation: Any) -> None:
        """Refuse an array of another shape or type than its space, save where the difference means nothing."""
        leaf, shape = self._reader.layout.leaves[key], self._memory.observation[key].shape[1:]
        for part in leaf.path:
            observation = observation[part]
        if value.shape == shape and _harmless(observation, value.dtype, leaf.dtype):
            return
        raise UserError(
            f'{self.name}: observation "{key}" is {value.dtype} of shape {value.shape}, but its space says '
            f"{leaf.dtype} of shape {shape}; return what the space says (.astype or .reshape), or change the space."
        )

    def _check_choices(self, observation: Mapping[str, NDArray[Any]]) -> None:
        """Refuse choices that the space does not have; a one-hot vector would silently be empty."""
        for key, sizes in self._sizes.items():
            x = observation[key]
            wrong = (x < 0) | (x >= sizes)
            if np.count_nonzero(wrong):
                raise UserError(
                    f'{self.name}: observation "{key}" has the choice {x[wrong].flat[0]} (counted from 0), but its '
                    f"space has {sizes}; widen the space or mend the value."
                )

    def _row_infos(self, infos: Any, row: int) -> dict[str, float]:
        return numeric(infos[row])


def _harmless(given: Any, found: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether a value of one type may stand for another: no precision is lost, or it had no type of its own."""
    if np.can_cast(found, wanted, "safe"):
        return True
    if np.issubdtype(wanted, np.integer):
        return np.issubdtype(found, np.integer) and (wanted == np.int64 or isinstance(given, int | list))
    return isinstance(given, int | float | list) and np.issubdtype(found, np.number)


def _unpack_reset(result: Any, name: str) -> tuple[Any, dict[str, Any]]:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return result
    raise UserError(
        f"{name}: reset returned {_count(result)}, but Gymnasium's reset returns 2 values: observation and info dict."
    )


def _count(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
