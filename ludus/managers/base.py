"""What all managers share: the memory behind a step, the account of episodes, and the way of actions."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.environment import EnvironmentManager, GoalReward
from ludus.core.errors import UserError
from ludus.core.step import EnvStep, Episode
from ludus.core.types import State, Tensors
from ludus.environments.gym import Environment
from ludus.environments.infos import numeric_info_row
from ludus.environments.masks import ObservationReader
from ludus.environments.rows import WARNINGS, StepArrays, episode_seed
from ludus.environments.spaces import Arrays, Layout
from ludus.managers import saved_state
from ludus.managers.episode_stats import COUNTED, EpisodeStats, Infos
from ludus.managers.history import History
from ludus.preprocess.actions import ActionPreprocessor


class BatchManager(EnvironmentManager):
    """The part of a manager that does not depend on what steps the environments.

    A subclass sets up its environments and implements ``_begin`` (reset all rows to the episodes that the account
    counts), ``_advance`` (one step of a group of rows, an ended row being reset instead), both of which fill
    ``_memory``, and ``_restore``. ``memory`` is given where others write it too; ``replays``: an episode can be brought
    back by its seed and actions, so these are kept.
    """

    render_fps = 0.0  # pictures per second that its environments are made for; 0: they do not say
    first_row = 0  # the number of its first row in the whole run, which seeds follow
    _goal_env: Environment | None = None  # asked for the rewards of goals, where there is one in this process

    def __init__(
        self,
        name: str,
        batch: int,
        reader: ObservationReader,
        actions: Layout,
        branch: int = 0,
        memory: StepArrays | None = None,
        groups: int = 1,
        replays: bool = False,
    ) -> None:
        self.name, self.batch = name, batch
        cuts = [batch * group // groups for group in range(groups + 1)]
        self.groups = [slice(start, stop) for start, stop in pairwise(cuts)]
        self.observation, self.action = reader.specs, actions.specs
        self._reader, self._layout = reader, actions
        self._treat = ActionPreprocessor(self.action, {})
        self._memory = StepArrays.allocate(self.observation, batch) if memory is None else memory
        parts = [self._memory.rows(rows) for rows in self.groups]
        self._real = np.zeros(batch, np.bool_)  # ~first: an ended row is reset at the next step
        self._flags = [(part.first, self._real[rows]) for part, rows in zip(parts, self.groups, strict=True)]
        self._steps = [_step(part, self._real[rows]) for part, rows in zip(parts, self.groups, strict=True)]
        self._last = self._steps[0] if groups == 1 else _step(self._memory, self._real)
        self._accounts = [
            EpisodeStats(part, rows.start, History(self.action, rows.stop - rows.start) if replays else None)
            for part, rows in zip(parts, self.groups, strict=True)
        ]
        self._pending: list[Arrays] = [{} for _ in self.groups]
        self._finished: list[Episode] = []
        self._seed, self._branch = 0, branch
        self._told = 0 if branch == 0 else -1  # bits of warnings; evaluation sees what training has warned of
        self._calling = False  # whether an environment is being called

    @abstractmethod
    def _begin(self) -> None:
        """Reset every row to the episode whose number the account has."""

    @abstractmethod
    def _advance(self, group: int) -> None:
        """Step a group by its pending actions and account for it; a row whose episode has ended is reset instead."""

    def _snapshot(self) -> State:
        """What brings the environments themselves back, beside seeds and actions."""
        return {}

    @abstractmethod
    def _restore(self, snapshot: State) -> dict[int, str]:
        """Bring the environments back to the step in memory, all else being there already.

        Returns the rows that began their next episode instead, in memory and account alike, each with the reason.
        """

    def set_action_transform(self, action_transform: Mapping[str, str]) -> None:
        self._treat = ActionPreprocessor(self.action, action_transform)

    def reset(self, seed: int) -> EnvStep:
        if seed < 0:
            raise UserError(f"The seed is {seed}, but seeds are 0 or more.")
        self._seed, self._finished, self.restored = seed, [], ""
        for account in self._accounts:
            account.begin()
        self._memory.mark_first()
        self.nb_calls += 1
        self._calling, began = True, time.monotonic()
        try:
            self._begin()
        finally:
            self._calling = False
        self.longest_call = max(self.longest_call, time.monotonic() - began)
        np.logical_not(self._memory.first, self._real)
        return self._last

    def send(self, actions: Tensors, group: int = 0) -> None:
        pending = self._pending[group] = self._treat({name: _numpy(x) for name, x in actions.items()})
        history = self._accounts[group].history
        if history is not None:
            history.record(pending)

    def recv(self, group: int = 0) -> EnvStep:
        self.nb_calls += 1
        self._calling, began = True, time.monotonic()
        try:
            self._advance(group)
        finally:
            self._calling = False
        self.longest_call = max(self.longest_call, time.monotonic() - began)
        np.logical_not(*self._flags[group])
        return self._steps[group]

    def current_call(self) -> tuple[int, ...] | None:
        return (self.nb_calls,) if self._calling else None

    def last_step(self) -> EnvStep:
        return self._last

    def read(self, observation: Any, info: Mapping[str, Any]) -> tuple[Arrays, bool]:
        """One observation of the environment, or a batch, as named arrays ``[B, …]``; and whether it was a batch."""
        try:
            name, array = next(iter(self._reader.layout.flatten(observation).items()))
        except (KeyError, IndexError, TypeError) as error:
            parts = ", ".join(self._reader.layout.specs)
            raise UserError(
                f"{self.name}: the observation is a {type(observation).__name__} that lacks a part of {parts}; give it "
                "as the environment does."
            ) from error
        if key := self._reader.missing_mask(info):
            raise UserError(
                f'{self.name} gives the action mask "{key}" in info: give it too, as in policy.act(observation, info).'
            )
        batched = array.ndim == len(self.observation[name].shape) + 1
        arrays = self._reader.read(observation, info, (len(array),) if batched else ())
        for name, x in arrays.items():
            expected = self.observation[name].shape
            if x.shape[batched:] != expected:
                raise UserError(
                    f'{self.name}: the observation "{name}" has shape {x.shape}; give {expected}, or a batch of such.'
                )
            self._refuse_lossy(name, x)
            typed = x.astype(self.observation[name].dtype, copy=False)
            arrays[name] = np.ascontiguousarray(typed if batched else typed[None])
        return arrays, batched

    def _refuse_lossy(self, name: str, x: NDArray[Any]) -> None:
        """Refuse numbers that the integers of an observation's space cannot hold, such as an image divided by 255."""
        wanted = np.dtype(self.observation[name].dtype)
        if x.dtype == wanted or not np.issubdtype(wanted, np.integer) or not np.issubdtype(x.dtype, np.number):
            return
        limits = np.iinfo(wanted)
        wrong = (x < limits.min) | (x > limits.max) | (x != np.trunc(x))  # NaN is no whole number either
        if wrong.any():
            value = np.asarray(x)[wrong].flat[0]
            raise UserError(
                f'{self.name}: the observation "{name}" is {x.dtype} and has {value:g}, but its space is {wanted}: '
                f"give whole numbers from {limits.min} to {limits.max}, as the environment does."
            )

    def write(self, actions: Tensors, batched: bool) -> Any:
        """Policy-space actions ``[B, …]`` as the environment takes them: a batch, or the only row."""
        arrays = self._treat({name: _numpy(x) for name, x in actions.items()})
        return self._layout.unflatten(arrays) if batched else self._layout.unflatten_row(arrays, 0)

    def nest_actions(self, values: Mapping[str, Any]) -> Any:
        """Arrange values by action name as the environment's action space is nested; the only one is given as it is."""
        return self._layout.nest(values)

    def goal_reward(self) -> GoalReward | None:
        if self._goal_env is None:
            return None
        from ludus.environments.goals import make_goal_reward  # what most runs do without is loaded where it is needed

        return make_goal_reward(self._goal_env, self.name)

    def _remarks(self) -> int:
        """The bits of ``WARNINGS`` that environments gave cause for."""
        return 0

    def episodes(self) -> list[Episode]:
        if new := self._remarks() & ~self._told:
            self._told |= new
            for bit, warning in WARNINGS.items():
                if new & bit:
                    self.on_warning(f"{self.name}: {warning}.")
        finished, self._finished = self._finished, []
        return finished

    def seed_of(self, *place: int) -> int:
        """The seed at a place under the run's seed and this manager's branch."""
        return episode_seed(self._seed, self._branch, *place)

    def batch_seed(self, number: int) -> int:
        """The seed of environments that have one generator for all rows, at their reset of this number."""
        return self.seed_of(self.first_row, number) if self.first_row else self.seed_of(number)

    def state_dict(self) -> State:
        joined = {name: np.concatenate([getattr(a, name) for a in self._accounts]) for name in COUNTED}
        return {
            "seed": self._seed,
            "branch": self._branch,
            "account": saved_state.tensors(joined),
            "last": saved_state.step_state(self._memory),
            "finished": [list(episode) for episode in self._finished],
            "actions": saved_state.actions_state([self._actions(row) for row in range(self.batch)]),
            "snapshot": saved_state.tensors(self._snapshot()),
        }

    def load_state_dict(self, state: State) -> None:
        saved_state.check(state, self._memory, self.name)
        self._seed, self._branch = int(state["seed"]), int(state["branch"])
        self._finished = [Episode(*episode) for episode in state["finished"]]
        saved_state.load_step(state["last"], self._memory)
        counted = saved_state.arrays(state["account"])
        actions = saved_state.load_actions(state["actions"])
        for account, rows in zip(self._accounts, self.groups, strict=True):
            account.load({name: x[rows] for name, x in counted.items()}, actions[rows])
        reasons = self._restore(saved_state.arrays(state["snapshot"]))
        np.logical_not(self._memory.first, self._real)
        self.restored = saved_state.told(reasons, self.batch, self.name)

    def _account_of(self, row: int) -> EpisodeStats:
        return next(a for a, rows in zip(self._accounts, self.groups, strict=True) if rows.start <= row < rows.stop)

    def _actions(self, row: int) -> Arrays | None:
        """The actions since a row's reset, where they are kept."""
        account = self._account_of(row)
        return None if account.history is None else account.history.actions(row - account.start)

    def _restart(self, why: str) -> dict[int, str]:
        """Begin the next episode in every row: what ``_restore`` does where none can come back."""
        for account in self._accounts:
            account.begin_next(slice(None))
            account.any_ended = False
        self._memory.mark_first()
        self._begin()
        return dict.fromkeys(range(self.batch), why)

    def _lose(self, row: int) -> None:
        """EpisodeStats for a row that began its next episode without an ending."""
        account = self._account_of(row)
        account.begin_next(row - account.start)

    def _note(self, group: int, reward: NDArray[Any], infos: Infos | None) -> None:
        """EpisodeStats for a step of a group; ``reward`` is what returns are made of."""
        self._finished += self._accounts[group].add(reward, infos)

    def _take_reset(self, observation: Any, infos: Mapping[str, Any]) -> None:
        """Take the reset of environments that step as a batch; a space that lies shows here."""
        for name, x in self._reader.read(observation, infos, (self.batch,)).items():
            own = self._memory.observation[name]
            if x.shape != own.shape or not np.can_cast(x.dtype, own.dtype, "same_kind"):
                raise UserError(
                    f'{self.name}: observation "{name}" is {x.dtype} of shape {x.shape}, but its space is '
                    f"{own.dtype} of shape {own.shape}; fix the space or the observation."
                )
        self._take_observation(observation, infos)
        self._settle_masks()

    def _take(self, observation: Any, reward: Any, terminated: Any, truncated: Any, infos: Mapping[str, Any]) -> None:
        """Take a step of environments that step as a batch and reset themselves at the step after an ending."""
        memory = self._memory
        self._take_observation(observation, infos)
        memory.reward[...] = reward
        memory.terminated[...] = terminated
        memory.truncated[...] = truncated
        account = self._accounts[0]
        memory.first[...] = account.ended
        if account.any_ended:
            begun = memory.first
            memory.reward[begun], memory.terminated[begun], memory.truncated[begun] = 0, False, False
        self._note(0, self._raw_reward(infos), lambda row: self._row_infos(infos, row))
        self._settle_masks()

    def _take_observation(self, observation: Any, infos: Mapping[str, Any]) -> None:
        target = self._memory.observation
        for name, x in self._reader.read(observation, infos, (self.batch,)).items():
            target[name][...] = x

    def _raw_reward(self, infos: Mapping[str, Any]) -> NDArray[Any]:
        """The reward that an episode's return is made of."""
        return self._memory.reward

    def _row_infos(self, infos: Any, row: int) -> dict[str, float]:
        return numeric_info_row(infos, row)

    def _settle_masks(self) -> None:
        if self._reader.masks is not None:
            self._reader.masks.resolve_empty(self._memory.observation, self._accounts[0].ended)


def _step(memory: StepArrays, real: NDArray[np.bool_]) -> EnvStep:
    """The torch views of a step, made once."""
    flat = map(torch.from_numpy, (memory.reward, memory.terminated, memory.truncated, memory.first, real))
    reward, terminated, truncated, first, happened = flat
    observation = {name: torch.from_numpy(x) for name, x in memory.observation.items()}
    return EnvStep(observation, reward, terminated, truncated, first, happened)


def _numpy(x: Tensor) -> NDArray[Any]:
    return x.numpy() if x.is_cpu else x.cpu().numpy()
