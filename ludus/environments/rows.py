"""Step the environments of some rows of a batch one after the other, into arrays. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.core.spec import Specs
from ludus.environments.config import DEFAULTS, EnvConfig
from ludus.environments.errors import environment_error
from ludus.environments.gym import Environment, frame_stack
from ludus.environments.infos import numeric_info
from ludus.environments.observations import ObservationReader
from ludus.environments.problems import (
    FIX_NAN,
    Problem,
    is_float_cast,
    is_lossless,
    observation_problems,
    reset_problems,
    step_problems,
    to_float,
)
from ludus.environments.snapshot import restore_snapshot, take_snapshot
from ludus.environments.spaces import Arrays, Layout

DIFFERS = "it is not deterministic: replaying its episode ends in another observation than the saved one"
TOO_LONG = "its episode is too long to be replayed"
ROW, REPLAYED, WARNING_BITS = range(3)  # indices of ``EnvRows.status``
CAST, ARRAY_REWARD = 1, 2  # bits of warnings
WARNINGS = {
    CAST: "observations come in a wider float type than that of their space, such as float64 for a Box of float32, and "
    "are cast; return them with .astype, or change the space",
    ARRAY_REWARD: "the reward is an array without dimensions and is converted; return float(reward)",
}


def episode_seed(seed: int, branch: int, *place: int) -> int:
    """Derive the seed of an episode from the run's seed, the branch, and the place (row, episode); it has 31 bits."""
    return int(np.random.SeedSequence(seed, spawn_key=(branch, *place)).generate_state(1)[0] >> 1)


@dataclass(frozen=True)
class StepArrays:
    """The last step of B rows, written in place: observations ``[B, …]`` by name, the rest ``[B]``."""

    observation: Arrays
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    first: NDArray[np.bool_]
    seed: NDArray[np.int64]  # seed of the running episode; -1 where episodes have no seed

    @staticmethod
    def fields(specs: Specs, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of every array by a flat name, as ``from_arrays`` expects them."""
        found = {f"observation/{name}": ((batch, *s.shape), s.dtype) for name, s in specs.items()}
        flags = dict.fromkeys(("terminated", "truncated", "first"), ((batch,), "bool"))
        return {**found, "reward": ((batch,), "float32"), **flags, "seed": ((batch,), "int64")}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> StepArrays:
        """Use existing arrays, named as in ``fields``."""
        prefix = "observation/"
        observation = {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
        return cls(observation, **{name: x for name, x in arrays.items() if not name.startswith(prefix)})

    @classmethod
    def allocate(cls, specs: Specs, batch: int) -> StepArrays:
        """Allocate new arrays."""
        made = cls.from_arrays(
            {name: np.zeros(shape, dtype) for name, (shape, dtype) in cls.fields(specs, batch).items()}
        )
        made.seed[:] = -1
        return made

    def rows(self, rows: slice) -> StepArrays:
        """Return views of some rows."""
        observation = {name: x[rows] for name, x in self.observation.items()}
        ends = self.terminated[rows], self.truncated[rows], self.first[rows]
        return StepArrays(observation, self.reward[rows], *ends, self.seed[rows])

    def mark_first(self, rows: slice | int = slice(None)) -> None:
        """Mark rows as the first step of an episode."""
        self.reward[rows] = 0
        self.terminated[rows] = self.truncated[rows] = False
        self.first[rows] = True


class EnvRows:
    """The environments of the rows ``start`` to ``start + count`` of a batch, with next-step autoreset.

    ``attach`` sets the arrays ``[B, …]`` of the whole batch to write to; row numbers are those of the batch. Then
    ``reset`` begins an episode in each row, and ``step`` steps all rows, or resets those that ended in the step before.
    The seed of an episode depends on the run's seed, the branch, the row and the number of the episode, so it does not
    matter which process a row runs in. ``config.repeat_seeds`` consecutive rows have the same seeds.

    ``status`` can be read while an environment is called, from another process if it lies in shared memory:
    ``status[ROW]`` is the row being called, ``status[REPLAYED]`` counts replayed steps, and ``status[WARNING_BITS]``
    has the bits of the ``WARNINGS`` that apply.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        start: int,
        count: int,
        name: str,
        config: EnvConfig = DEFAULTS,
        branch: int = 0,
        status: NDArray[np.int64] | None = None,
    ) -> None:
        self.name, self.rows, self.seed, self.branch = name, range(start, start + count), 0, branch
        self.first_row = 0  # global number of row 0, which seeds follow
        self.status: NDArray[np.int64] = np.zeros(3, np.int64) if status is None else status
        self._start, self._slice, self._repeat_seeds = start, slice(start, start + count), config.repeat_seeds
        self._envs: list[Environment] = []
        for row in self.rows:
            self.status[ROW] = row
            self._envs.append(make())
        self._step_methods = [env.step for env in self._envs]
        self.layout = Layout(self._envs[0].action_space, "action", name)
        self._first_reset = self._reset(start, 0)
        space = self._envs[0].observation_space
        info, frames = self._first_reset[1], partial(frame_stack, self._envs[0])
        self.reader = ObservationReader(space, self.layout.specs, config, info, name, frames)
        self.observation, self.action = self.reader.specs, self.layout.specs
        self._episodes = [0] * count
        self._ended = [False] * count
        leaves = self.reader.layout.leaves
        # a categorical observation may be stored in smaller integers than those of its space: then its dtype always
        # differs, and ``_check`` compares the choices before they could wrap around
        narrow = {key: np.dtype(leaves[key].spec.dtype) for key in self.reader.sizes}
        self._dtypes = {key: leaf.dtype for key, leaf in leaves.items()} | narrow

    def attach(self, memory: StepArrays) -> None:
        """Write into these arrays of the whole batch.

        Refuse a first observation that does not fit its space or has NaN, unknown choices or an empty mask.
        """
        self._memory, self._own_memory = memory, memory.rows(self._slice)
        (name, spec), *more = self.observation.items()
        leaf = self.reader.layout.leaves.get(name)
        plain = leaf is not None and not (more or leaf.path or leaf.start is not None)
        # the observation of a single Box is copied to its row directly; None never equals an array's shape
        self._shape, self._dtype = spec.shape if plain else None, self._dtypes.get(name)
        self._views = [memory.observation[name][row : row + 1].reshape(spec.shape) for row in self.rows]
        row = self._start
        self._write(row, *self._first_reset)
        first = {key: x[row : row + 1] for key, x in memory.observation.items()}
        for key, x in first.items():
            if not np.isfinite(x).all():
                problem = Problem(f'observation "{key}" of the first reset has NaN or infinite values.', FIX_NAN)
                raise UserError(f"{self.name}: {problem}")
        self.reader.check(first, [False], row)

    def reset(self, seed: int, episodes: Sequence[int]) -> None:
        """Begin the episodes with these numbers, one per row, under the run's seed."""
        self.seed = seed
        for row, episode in zip(self.rows, episodes, strict=True):
            self._reset_row(row, episode)
        self.reader.check(self._own_memory.observation, self._ended, self._start)

    def step(self, actions: Arrays) -> dict[int, dict[str, float]]:
        """Step with actions ``[B, …]`` of the whole batch; a row that ended in the step before is reset instead.

        Return the numeric infos of the rows that end in this step, by row.
        """
        memory = self._own_memory
        for flags in (memory.first, memory.terminated, memory.truncated):
            flags.fill(False)  # takes a third of the time of [:] = False
        infos = self._step_rows(enumerate(self._unflatten(actions, self._slice)))
        self.reader.check(self._own_memory.observation, self._ended, self._start)
        return infos

    @property
    def env(self) -> Environment:
        """The environment of the first row."""
        return self._envs[0]

    def snapshot(self, row: int) -> dict[str, Any] | None:
        """Return the state of a row's environment; None if it cannot be saved."""
        self.status[ROW] = row
        try:
            return take_snapshot(self._envs[row - self._start])
        except Exception as error:
            raise environment_error(self.name, "snapshot", error) from error

    def restore_row(
        self, row: int, episode: int, ended: bool, snapshot: Mapping[str, Any] | None, actions: Arrays | None
    ) -> str:
        """Restore a row to the step in the arrays: from its snapshot, else by replaying ``actions`` ``[n, …]``.

        ``seed`` and ``branch`` must be set. Return "" on success; otherwise the row begins its next episode, and the
        reason is returned.
        """
        i = row - self._start
        self.status[ROW], self._episodes[i], self._ended[i] = row, episode, ended
        if ended and snapshot is None:  # the next step resets it
            return ""
        reason = self._restore_episode(row, snapshot, actions)
        if reason:
            self._reset_row(row, episode + 1)
            self.reader.check(self._own_memory.observation, self._ended, self._start)
        return reason

    def seed_of(self, row: int, episode: int) -> int:
        """Return the seed of an episode."""
        return episode_seed(self.seed, self.branch, (self.first_row + row) // self._repeat_seeds, episode)

    def render(self, row: int) -> Any:
        """Render one environment."""
        try:
            return self._envs[row - self._start].render()
        except Exception as error:
            raise environment_error(self.name, "render", error) from error

    def close(self) -> None:
        """Close the environments; may be called twice."""
        envs, self._envs, self._step_methods = self._envs, [], []
        with ExitStack() as stack:  # closes all, even if one fails
            for env in envs:
                stack.callback(env.close)

    def _unflatten(self, actions: Arrays, rows: slice) -> Iterable[Any]:
        """Return copies of the actions of some rows, each as its environment expects it."""
        own = {name: x[rows].copy() for name, x in actions.items()}
        if self.layout.is_plain:
            return self.layout.unflatten(own)  # type: ignore[no-any-return]
        return (self.layout.unflatten_row(own, i) for i in range(len(next(iter(own.values())))))

    def _reset_row(self, row: int, episode: int) -> None:
        i, seed = row - self._start, self.seed_of(row, episode)
        self.status[ROW], self._episodes[i], self._ended[i] = row, episode, False
        self._memory.mark_first(row)
        self._memory.seed[row] = seed
        self._write(row, *self._reset(row, seed))

    def _reset(self, row: int, seed: int) -> tuple[Any, dict[str, Any]]:
        try:
            result = self._envs[row - self._start].reset(seed=seed)
        except Exception as error:
            raise environment_error(self.name, "reset", error) from error
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        raise self._error(reset_problems(result))

    def _step_rows(self, steps: Iterable[tuple[int, Any]]) -> dict[int, dict[str, float]]:
        """Step environments, given by their index here and their action; ended ones are reset.

        Flags are written only where an episode ends. This loop is on the path of every step, so the usual types are
        recognized by identity and everything else is handled in other methods.
        """
        memory, start, status, ended, infos = self._memory, self._start, self.status, self._ended, {}
        methods, views, shape, dtype = self._step_methods, self._views, self._shape, self._dtype
        for i, action in steps:
            row = status[ROW] = start + i
            if ended[i]:
                self._reset_row(row, self._episodes[i] + 1)
                continue
            try:
                result = methods[i](action)
            except Exception as error:
                raise environment_error(self.name, "step", error) from error
            try:
                observation, reward, terminated, truncated, info = result
            except (TypeError, ValueError) as error:
                raise self._error(step_problems(result)) from error
            if not isinstance(info, dict):
                raise self._error(step_problems(result))
            if type(observation) is np.ndarray and observation.shape == shape and observation.dtype == dtype:
                views[i][...] = observation
            else:
                self._write(row, observation, info)
            memory.reward[row] = reward if isinstance(reward, float) else self._to_float(result)
            if terminated is not False or truncated is not False:
                try:
                    memory.terminated[row], memory.truncated[row] = bool(terminated), bool(truncated)
                except (TypeError, ValueError) as error:
                    raise self._error(step_problems(result)) from error
                if terminated or truncated:
                    ended[i], infos[row] = True, numeric_info(info)
        return infos

    def _error(self, problems: Iterable[Problem]) -> UserError:
        """Return the error that names the first of some problems that is more than a warning."""
        return UserError(f"{self.name}: {next(problem for problem in problems if problem.severity == 'error')}")

    def _to_float(self, result: tuple[Any, ...]) -> float:
        """Return the reward of a step."""
        reward = result[1]
        number = to_float(reward)
        if number is None:
            raise self._error(step_problems(result))
        if not isinstance(reward, np.generic) and hasattr(reward, "shape"):
            self.status[WARNING_BITS] |= ARRAY_REWARD
        return number

    def _restore_episode(self, row: int, snapshot: Mapping[str, Any] | None, actions: Arrays | None) -> str:
        """Restore the running episode of a row; return why that failed, or ""."""
        i, memory = row - self._start, self._memory
        arrays = [*memory.observation.values(), memory.reward, memory.terminated, memory.truncated]
        saved, episode = [x[row].copy() for x in arrays], self._episodes[i]
        try:
            reset = self._reset(row, int(memory.seed[row]))
            if snapshot is not None:
                restore_snapshot(self._envs[i], snapshot)
                return ""
            if actions is None:
                return TOO_LONG
            memory.reward[row] = 0
            self._write(row, *reset)
            for action in self._unflatten(actions, slice(None)):
                self.status[REPLAYED] += 1
                self._step_rows([(i, action)])
        except Exception as error:
            return f"it cannot be restored ({str(environment_error(self.name, 'restore', error)).rstrip('.')})"
        # an ending during the replay shows as another episode number, or as another flag
        same = self._episodes[i] == episode
        for x, value in zip(arrays, saved, strict=True):
            same = same and _same(x[row], value)
            x[row] = value  # a NaN keeps its bits
        return "" if same else DIFFERS

    def _write(self, row: int, observation: Any, info: Mapping[str, Any]) -> None:
        try:
            arrays = self.reader.read(observation, info)
        except (KeyError, IndexError, TypeError) as error:
            lacks = Problem(f"the observation lacks {error} of its observation space", "Return all its parts.")
            raise self._error([*observation_problems(self.reader.layout.space, observation), lacks]) from error
        for key, value in arrays.items():
            target, wanted = self._memory.observation[key], self._dtypes.get(key)
            if value.shape != target.shape[1:] or (wanted is not None and value.dtype != wanted):
                self._check(key, value, observation)
            target[row] = value

    def _check(self, key: str, value: NDArray[Any], observation: Any) -> None:
        """Refuse an array that does not have the shape and type of its space, unless no precision is lost."""
        leaf, shape = self.reader.layout.leaves[key], self._memory.observation[key].shape[1:]
        given = reduce(getitem, leaf.path, observation)
        if value.shape == shape and is_lossless(given, value.dtype, leaf.dtype):
            self.reader.check_choices({key: value})
            return
        if value.shape == shape and is_float_cast(value.dtype, leaf.dtype):
            self.status[WARNING_BITS] |= CAST
            self._dtype = self._dtypes[key] = value.dtype  # checked once
            return
        raise UserError(
            f'{self.name}: observation "{key}" is {value.dtype} of shape {value.shape}, but its space is '
            f"{leaf.dtype} of shape {shape}; convert it (.astype or .reshape), or change the space."
        )


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Compare bit by bit; all NaNs are equal."""
    if np.issubdtype(a.dtype, np.inexact):
        a, b = (np.where(np.isnan(x), np.nan, x) for x in (a, b))
    return a.tobytes() == b.tobytes()
