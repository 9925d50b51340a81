"""A range of rows of a batch: their environments, stepped one after the other into arrays. Needs numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.core.spec import Specs
from ludus.environments.errors import environment_error
from ludus.environments.gym import Environment, frame_stack
from ludus.environments.infos import numeric_info
from ludus.environments.masks import ObservationReader
from ludus.environments.problems import is_float_cast, observation_problems
from ludus.environments.snapshot import restore_snapshot, take_snapshot
from ludus.environments.spaces import Arrays, Layout

DIFFERS = "it is not deterministic: its episode, replayed, ends in another observation than the saved one"
TOO_LONG = "its episode is too long to be replayed"
ROW, REPLAYED, WARNING_BITS = range(3)  # indices of ``EnvRows.status``
CAST, ARRAY_REWARD = 1, 2  # the remarks, as bits
WARNINGS = {
    CAST: "observations come in a wider float type than their space says, such as float64 in a Box of float32, and are "
    "cast; return them with .astype, or change the space",
    ARRAY_REWARD: "the reward is an array without dimensions, and is taken as a number; return float(reward)",
}


def episode_seed(seed: int, branch: int, *place: int) -> int:
    """The seed at a place (row and episode) under a run's seed and branch; 31 bits, which every engine takes."""
    return int(np.random.SeedSequence(seed, spawn_key=(branch, *place)).generate_state(1)[0] >> 1)


@dataclass(frozen=True)
class StepArrays:
    """The last step of B rows, written in place: observations ``[B, …]`` by name, the rest ``[B]``."""

    observation: Arrays
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    first: NDArray[np.bool_]
    seed: NDArray[np.int64]  # what the running episode was reset with; -1 where there is none of its own

    @staticmethod
    def fields(specs: Specs, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array, by a flat name: what shared memory must hold for ``over``."""
        found = {f"observation/{name}": ((batch, *s.shape), s.dtype) for name, s in specs.items()}
        flags = dict.fromkeys(("terminated", "truncated", "first"), ((batch,), "bool"))
        return {**found, "reward": ((batch,), "float32"), **flags, "seed": ((batch,), "int64")}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> StepArrays:
        """The step in given arrays, named as in ``fields``."""
        start = "observation/"
        observation = {name.removeprefix(start): x for name, x in arrays.items() if name.startswith(start)}
        return cls(observation, **{name: x for name, x in arrays.items() if not name.startswith(start)})

    @classmethod
    def allocate(cls, specs: Specs, batch: int) -> StepArrays:
        """The step in new memory."""
        made = cls.from_arrays(
            {name: np.zeros(shape, dtype) for name, (shape, dtype) in cls.fields(specs, batch).items()}
        )
        made.seed[:] = -1
        return made

    def rows(self, rows: slice) -> StepArrays:
        """Views of some rows."""
        observation = {name: x[rows] for name, x in self.observation.items()}
        ends = self.terminated[rows], self.truncated[rows], self.first[rows]
        return StepArrays(observation, self.reward[rows], *ends, self.seed[rows])

    def mark_first(self, rows: slice | int = slice(None)) -> None:
        """Make rows the first of an episode."""
        self.reward[rows] = 0
        self.terminated[rows] = self.truncated[rows] = False
        self.first[rows] = True


class EnvRows:
    """The environments of the rows ``start`` to ``start + count`` of a batch, with next-step autoreset.

    ``attach`` sets the arrays ``[B, …]`` of the whole batch to write to; row numbers are those of the batch. Then
    ``reset`` begins an episode in each row, and ``step`` steps all rows, or resets those that ended in the step before.
    The seed of an episode depends on the run's seed, the branch, the row and the number of the episode, so it does not
    matter which process a row runs in.

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
        mask: str = "action_mask",
        branch: int = 0,
        status: NDArray[np.int64] | None = None,
    ) -> None:
        self.name, self.rows, self.seed, self.branch = name, range(start, start + count), 0, branch
        self.first_row = 0  # the number of the batch's first row in the whole run
        self.status: NDArray[np.int64] = np.zeros(3, np.int64) if status is None else status
        self._start, self._slice = start, slice(start, start + count)
        self._envs = [self._make_row(make, row) for row in self.rows]
        self._calls = [env.step for env in self._envs]
        self.layout = Layout(self._envs[0].action_space, "action", name)
        self._plain_action = not isinstance(self.layout.space, spaces.Dict | spaces.Tuple)
        self._example = self._reset(start, 0)
        space = self._envs[0].observation_space
        self.reader = ObservationReader(space, self.layout.specs, mask, self._example[1], name)
        self.reader.mark_frame_stack(frame_stack(self._envs[0]))
        self.observation, self.action = self.reader.specs, self.layout.specs
        self._episodes = [0] * count
        self._ended = [False] * count
        leaves = self.reader.layout.leaves
        self._dtypes = {key: leaf.dtype for key, leaf in leaves.items()}
        self._sizes = {
            key: np.reshape(leaf.spec.sizes, leaf.spec.shape)
            for key, leaf in leaves.items()
            if leaf.spec.kind == "categorical"
        }

    def attach(self, memory: StepArrays) -> None:
        """Write into these arrays of the whole batch from now on; refuse what a first reset shows to be wrong."""
        self._memory, self._own = memory, memory.rows(self._slice)
        (name, leaf), *more = self.reader.layout.leaves.items()
        plain = not (more or leaf.path or self.reader.masks or leaf.start is not None)
        # a lone Box that is just what its space says goes straight to its row; no array has the shape None
        self._shape, self._dtype = leaf.spec.shape if plain else None, leaf.dtype
        self._views = [memory.observation[name][row : row + 1].reshape(leaf.spec.shape) for row in self.rows]
        self._look_at_first()

    def reset(self, seed: int, episodes: Sequence[int]) -> None:
        """Reset all rows to the episodes of these numbers (one per row of its own) under the run's seed."""
        self.seed = seed
        for row, episode in zip(self.rows, episodes, strict=True):
            self._begin_row(row, episode)
        self._check_rows()

    def step(self, actions: Arrays) -> dict[int, dict[str, float]]:
        """Step by actions ``[B, …]`` of the whole batch, as the environment takes them; an ended row is reset.

        Returns the numeric infos of the rows whose episode ended in this step, by row.
        """
        own = self._own
        for flags in (own.first, own.terminated, own.truncated):
            flags.fill(False)  # a third of the time of [:] = False
        infos = self._run(enumerate(self._unflatten(actions, self._slice)))
        self._check_rows()
        return infos

    @property
    def env(self) -> Environment:
        """The first of its environments."""
        return self._envs[0]

    def snapshot(self, row: int) -> dict[str, Any] | None:
        """All of a row's environment, where it can give that."""
        self.status[ROW] = row
        try:
            return take_snapshot(self._envs[row - self._start])
        except Exception as error:
            raise environment_error(self.name, "snapshot", error) from error

    def restore_row(
        self, row: int, episode: int, ended: bool, snapshot: Mapping[str, Any] | None, actions: Arrays | None
    ) -> str:
        """Bring a row back to the step that the arrays hold: by its snapshot, else by seed and ``actions`` ``[n, …]``.

        ``seed`` and ``branch`` must be set. Returns nothing if it is there; else why not, and the row is at the first
        step of its next episode, with no ending before it.
        """
        i = row - self._start
        self.status[ROW], self._episodes[i], self._ended[i] = row, episode, ended
        if ended and snapshot is None:  # its next step is a reset
            return ""
        why = self._recall(row, snapshot, actions)
        if why:
            self._begin_row(row, episode + 1)
            self._check_rows()
        return why

    def seed_of(self, row: int, episode: int) -> int:
        """The seed of an episode."""
        return episode_seed(self.seed, self.branch, self.first_row + row, episode)

    def render(self, row: int) -> Any:
        """The picture of one environment, as its render mode gives it."""
        try:
            return self._envs[row - self._start].render()
        except Exception as error:
            raise environment_error(self.name, "render", error) from error

    def close(self) -> None:
        """Close the environments; may be called twice."""
        envs, self._envs, self._calls = self._envs, [], []
        with ExitStack() as stack:  # one that fails does not keep the others from closing
            for env in envs:
                stack.callback(env.close)

    def _make_row(self, make: Callable[[], Environment], row: int) -> Environment:
        self.status[ROW] = row
        return make()

    def _unflatten(self, actions: Arrays, rows: slice) -> Iterable[Any]:
        """The actions of some rows, each as its environment takes it; it may keep it, so it is a copy."""
        own = {name: x[rows].copy() for name, x in actions.items()}
        if self._plain_action:
            return self.layout.unflatten(own)  # type: ignore[no-any-return]
        return (self.layout.unflatten_row(own, i) for i in range(len(next(iter(own.values())))))

    def _begin_row(self, row: int, episode: int) -> None:
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
        raise UserError(
            f"{self.name}: reset returned {_count(result)}, but Gymnasium's reset returns 2 values: observation and "
            "info dict."
        )

    def _run(self, steps: Iterable[tuple[int, Any]]) -> dict[int, dict[str, float]]:
        """Make steps, each an environment (counted from the first of its own) and its action; ended ones are reset.

        All is written but the flags of rows where nothing ends. Every step pays for this loop, so the usual case is
        told by identity, and what is rare is done elsewhere. Returns the numeric infos of the rows that end, by row.
        """
        memory, start, where, ended, infos = self._memory, self._start, self.status, self._ended, {}
        calls, views, shape, dtype = self._calls, self._views, self._shape, self._dtype
        for i, action in steps:
            row = where[ROW] = start + i
            if ended[i]:
                self._begin_row(row, self._episodes[i] + 1)
                continue
            try:
                result = calls[i](action)
            except Exception as error:
                raise environment_error(self.name, "step", error) from error
            try:
                observation, reward, terminated, truncated, info = result
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"{self.name}: step returned {_count(result)}, but Gymnasium's step returns 5 values: observation, "
                    "reward, terminated, truncated, info."
                ) from error
            if not isinstance(info, dict):
                raise UserError(f"{self.name}: step returned {info!r} as info; return a dict, which may be empty.")
            if type(observation) is np.ndarray and observation.shape == shape and observation.dtype == dtype:
                views[i][...] = observation
            else:
                self._write(row, observation, info)
            memory.reward[row] = reward if type(reward) is float else self._number(reward)
            if (terminated is not False or truncated is not False) and self._ends(row, terminated, truncated):
                ended[i], infos[row] = True, numeric_info(info)
        return infos

    def _number(self, reward: Any) -> float:
        try:
            if getattr(reward, "shape", ()) != ():
                raise TypeError("an array of numbers is none")
            if not isinstance(reward, np.generic) and hasattr(reward, "shape"):
                self.status[WARNING_BITS] |= ARRAY_REWARD
            return reward.__float__()  # type: ignore[no-any-return] # float() would read a text, numpy None as NaN
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{self.name}: the reward is {reward!r}, which is not a number; return a float.") from error

    def _ends(self, row: int, terminated: Any, truncated: Any) -> bool:
        try:
            ends = bool(terminated), bool(truncated)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self.name}: terminated is {terminated!r} and truncated {truncated!r}; return two bools."
            ) from error
        self._memory.terminated[row], self._memory.truncated[row] = ends
        return any(ends)

    def _recall(self, row: int, snapshot: Mapping[str, Any] | None, actions: Arrays | None) -> str:
        """Bring a row's environment back; return why it is not where it was, if it is not."""
        i, saved = row - self._start, _copy(self._memory, row)
        episode = self._episodes[i]
        try:
            reset = self._reset(row, int(self._memory.seed[row]))
            if snapshot is not None:
                restore_snapshot(self._envs[i], snapshot)
                return ""
            if actions is None:
                return TOO_LONG
            self._memory.reward[row] = 0
            self._write(row, *reset)
            self._run(self._counting(i, self._unflatten(actions, slice(None))))
        except Exception as error:
            return f"it cannot be brought back ({str(environment_error(self.name, 'restore', error)).rstrip('.')})"
        # an ending on the way is an episode too many, or an ending now
        same = self._episodes[i] == episode and all(map(_same, saved, _copy(self._memory, row)))
        for x, value in zip(_arrays(self._memory), saved, strict=True):
            x[row] = value  # a NaN keeps its bits
        return "" if same else DIFFERS

    def _counting(self, i: int, actions: Iterable[Any]) -> Iterable[tuple[int, Any]]:
        """Steps of one environment, counted in ``where``."""
        for action in actions:
            self.status[REPLAYED] += 1
            yield i, action

    def _look_at_first(self) -> None:
        """Refuse, before training begins, what a reset shows to be wrong."""
        row = self._start
        self._write(row, *self._example)
        first = {key: x[row : row + 1] for key, x in self._memory.observation.items()}
        for key, x in first.items():
            if not np.isfinite(x).all():
                raise UserError(
                    f'{self.name}: observation "{key}" of the first reset has NaN or infinite values; find the '
                    "division by zero or the overflow that made it so."
                )
        self._check_choices(first)
        if self.reader.masks is not None:
            self.reader.masks.resolve_empty(first, np.zeros(1, np.bool_), row)

    def _check_rows(self) -> None:
        """What is looked at once for all rows: choices, and masks that allow nothing."""
        if self._sizes:
            self._check_choices(self._own.observation)
        if self.reader.masks is not None:
            self.reader.masks.resolve_empty(self._own.observation, np.array(self._ended), self._start)

    def _write(self, row: int, observation: Any, info: Mapping[str, Any]) -> None:
        try:
            arrays = self.reader.read(observation, info)
        except (KeyError, IndexError, TypeError) as error:
            what = f"the observation lacks {error} of its observation space"
            if not isinstance(error, KeyError):
                what = next((p.what[:-1] for p in observation_problems(self.reader.layout.space, observation)), what)
            raise UserError(f"{self.name}: {what}; return all its parts.") from error
        for key, value in arrays.items():
            target, wanted = self._memory.observation[key], self._dtypes.get(key)
            if value.shape != target.shape[1:] or (wanted is not None and value.dtype != wanted):
                self._check(key, value, observation)
            target[row] = value

    def _check(self, key: str, value: NDArray[Any], observation: Any) -> None:
        """Refuse an array of another shape or type than its space, save where the difference means nothing."""
        leaf, shape = self.reader.layout.leaves[key], self._memory.observation[key].shape[1:]
        for part in leaf.path:
            observation = observation[part]
        if value.shape == shape and _harmless(observation, value.dtype, leaf.dtype):
            return
        if value.shape == shape and is_float_cast(value.dtype, leaf.dtype):
            self.status[WARNING_BITS] |= CAST
            self._dtype = self._dtypes[key] = value.dtype  # the usual case from now on
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
                    f"space has {sizes}; widen the space or fix the value."
                )


def _harmless(given: Any, found: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether a value of one type may stand for another: no precision is lost, or it had no type of its own."""
    if np.can_cast(found, wanted, "safe"):
        return True
    if np.issubdtype(wanted, np.integer):
        return np.issubdtype(found, np.integer) and (wanted == np.int64 or isinstance(given, int | list))
    return isinstance(given, int | float | list) and np.issubdtype(found, np.number)


def _count(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"


def _arrays(memory: StepArrays) -> list[NDArray[Any]]:
    return [*memory.observation.values(), memory.reward, memory.terminated, memory.truncated]


def _copy(memory: StepArrays, row: int) -> list[NDArray[Any]]:
    return [np.array(x[row]) for x in _arrays(memory)]


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Bit for bit, but any NaN is like any other."""
    if a.tobytes() == b.tobytes():
        return True
    if not np.issubdtype(a.dtype, np.inexact):
        return False
    a, b = (np.where(np.isnan(x), np.nan, x) for x in (a, b))
    return a.tobytes() == b.tobytes()
