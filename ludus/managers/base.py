"""The base class of managers: memory of a step, actions, episode statistics and checkpoints."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from ludus.core.environment import EnvironmentManager, GoalReward
from ludus.core.errors import UserError
from ludus.core.step import EnvStep, Episode
from ludus.core.types import State, Tensors
from ludus.environments.gym import Environment
from ludus.environments.multiagent import JointEnv
from ludus.environments.observations import ObservationReader, override_axes
from ludus.environments.preprocess import PreprocessObservation, PreviousStep
from ludus.environments.rows import WARNINGS, StepArrays, episode_seed
from ludus.environments.spaces import Arrays, Layout
from ludus.managers import saved_state
from ludus.managers.episode_stats import SAVED, EpisodeStats
from ludus.managers.history import ActionHistory
from ludus.preprocess.actions import ActionPreprocessor
from ludus.preprocess.frame_stack import FrameStack, make_frame_stack


class BatchManager(EnvironmentManager):
    """The part of a manager that does not depend on how environments are stepped.

    A subclass creates its environments and implements ``_reset_rows`` and ``_step_rows``, which write to ``_memory``,
    and ``_restore``. ``memory`` is given if other processes write to it. With ``keep_actions``, the actions of running
    episodes are stored, so that a checkpoint can restore an episode by its seed and actions.
    """

    render_fps = 0.0  # frames per second of videos; 0: unknown
    first_row = 0  # number of its first row in the whole run, for seeds
    # ops of ``preprocess.observation``: on images and of the previous step, if the environments are in this process
    image_ops: PreprocessObservation | None = None
    previous_step: PreviousStep | None = None
    frame_stack: FrameStack | None = None
    joint_env: JointEnv | None = None  # several agents: one of the environments, if they are in this process
    _goal_env: Environment | None = None  # computes rewards of goals, if it is in this process

    def __init__(
        self,
        name: str,
        batch: int,
        reader: ObservationReader,
        actions: Layout,
        branch: int = 0,
        memory: StepArrays | None = None,
        groups: int = 1,
        keep_actions: bool = False,
    ) -> None:
        self.name, self.batch = name, batch
        self.groups = [slice(*cut) for cut in pairwise(batch * group // groups for group in range(groups + 1))]
        self.observation, self.action = reader.specs, actions.specs
        self.reader, self.layout = reader, actions
        self.preprocess_actions = ActionPreprocessor(self.action, {})
        self._memory = StepArrays.allocate(self.observation, batch) if memory is None else memory
        self._real = np.zeros(batch, np.bool_)  # ~first, since rows are reset at the step after an ending
        self._steps, self._stats = [], []
        for rows in self.groups:
            part = self._memory.rows(rows)
            history = ActionHistory(self.action, rows.stop - rows.start) if keep_actions else None
            self._steps.append(_make_step(part, self._real[rows]))
            self._stats.append(EpisodeStats(part, rows.start, history))
        self._last = self._steps[0] if groups == 1 else _make_step(self._memory, self._real)
        self._pending: list[Arrays] = [{} for _ in self.groups]  # actions to step with
        self._finished: list[Episode] = []
        self._seed, self._branch = 0, branch
        self._warned = 0 if branch == 0 else -1  # bits of ``WARNINGS``; evaluation repeats none of training's
        self._calling = False  # whether an environment is being called

    @abstractmethod
    def _reset_rows(self) -> None:
        """Reset every row to the episode with the number in its stats."""

    @abstractmethod
    def _step_rows(self, group: int) -> None:
        """Step a group with its pending actions and update its stats; reset rows that ended in the step before."""

    def _snapshot(self) -> State:
        """Return the state of the environments, beside seeds and actions."""
        return {}

    @abstractmethod
    def _restore(self, snapshot: State) -> dict[int, str]:
        """Restore the environments; memory, stats and seed are already loaded.

        Return the rows that could not be restored and started their next episode, each with the reason.
        """

    def stack_frames(self, pipeline: Iterable[str], axes: Iterable[str] = ()) -> None:
        """Apply the op ``stack`` of ``preprocess.observation``; ``axes`` is the setting ``env.axes`` of the stacks."""
        specs, self.frame_stack = make_frame_stack(self.observation, pipeline)
        self.observation = override_axes(specs, axes, self.name)

    def set_action_transform(self, action_transform: Mapping[str, str]) -> None:
        self.preprocess_actions = ActionPreprocessor(self.action, action_transform)

    def reset(self, seed: int) -> EnvStep:
        if seed < 0:
            raise UserError(f"The seed is {seed}, but seeds are 0 or more.")
        self._seed, self._finished, self.restored = seed, [], ""
        for stats in self._stats:
            stats.reset()
        self._memory.mark_first()
        self._time_call(self._reset_rows)
        np.logical_not(self._memory.first, self._real)
        return self._last if self.frame_stack is None else self.frame_stack.push(self._last)

    def send(self, actions: Tensors, group: int = 0) -> None:
        arrays = {name: x.numpy() if x.is_cpu else x.cpu().numpy() for name, x in actions.items()}
        pending = self._pending[group] = self.preprocess_actions(arrays)
        history = self._stats[group].history
        if history is not None:
            history.append(pending)

    def recv(self, group: int = 0) -> EnvStep:
        self._time_call(self._step_rows, group)
        rows = self.groups[group]
        np.logical_not(self._memory.first[rows], self._real[rows])
        step = self._steps[group]
        return step if self.frame_stack is None else self.frame_stack.push(step, rows)

    def _time_call(self, function: Callable[..., None], *args: int) -> None:
        self.nb_calls += 1
        self._calling, start = True, time.monotonic()
        try:
            function(*args)
        finally:
            self._calling = False
        self.longest_call = max(self.longest_call, time.monotonic() - start)

    def current_call(self) -> tuple[int, ...] | None:
        return (self.nb_calls,) if self._calling else None

    def last_step(self) -> EnvStep:
        return self._last if self.frame_stack is None else self.frame_stack.last(self._last)

    def goal_reward(self) -> GoalReward | None:
        if self._goal_env is None:
            return None
        from ludus.environments.goals import make_goal_reward  # only needed by few runs

        return make_goal_reward(self._goal_env, self.name)

    def _warning_bits(self) -> int:
        """Return the bits of the ``WARNINGS`` that apply to the environments."""
        return 0

    def episodes(self) -> list[Episode]:
        if new := self._warning_bits() & ~self._warned:
            self._warned |= new
            for bit, warning in WARNINGS.items():
                if new & bit:
                    self.on_warning(f"{self.name}: {warning}.")
        finished, self._finished = self._finished, []
        return finished

    def derive_seed(self, *key: int) -> int:
        """Return the seed of a key, such as (row, episode), under the run's seed and this manager's branch."""
        return episode_seed(self._seed, self._branch, *key)

    def state_dict(self) -> State:
        stats = {name: np.concatenate([getattr(part, name) for part in self._stats]) for name in SAVED}
        return {
            "seed": self._seed,
            "branch": self._branch,
            "stats": saved_state.to_tensors(stats),
            "last": saved_state.save_step(self._memory),
            "finished": [list(episode) for episode in self._finished],
            "actions": saved_state.save_actions([self._actions(row) for row in range(self.batch)]),
            "snapshot": saved_state.to_tensors(self._snapshot()),
            "stacks": {} if self.frame_stack is None else dict(self.frame_stack.stacks),
        }

    def load_state_dict(self, state: State) -> None:
        saved_state.check_compatible(state, self._memory, self.name)
        self._seed, self._branch = int(state["seed"]), int(state["branch"])
        self._finished = [Episode(*episode) for episode in state["finished"]]
        saved_state.load_step(state["last"], self._memory)
        saved = saved_state.to_arrays(state["stats"])
        actions = saved_state.load_actions(state["actions"])
        for stats, rows in zip(self._stats, self.groups, strict=True):
            stats.load({name: x[rows] for name, x in saved.items()}, actions[rows])
        reasons = self._restore(saved_state.to_arrays(state["snapshot"]))
        np.logical_not(self._memory.first, self._real)
        if self.frame_stack is not None:
            self.frame_stack.load(state["stacks"], self._last)
        self.restored = saved_state.describe_restore(reasons, self.batch, self.name)

    def _stats_of(self, row: int) -> tuple[EpisodeStats, int]:
        """Return the stats that contain a row, and its index in them."""
        stats = next(s for s, rows in zip(self._stats, self.groups, strict=True) if rows.start <= row < rows.stop)
        return stats, row - stats.start

    def _actions(self, row: int) -> Arrays | None:
        """Return the actions since a row's reset, if they are stored."""
        stats, index = self._stats_of(row)
        return None if stats.history is None else stats.history.actions(index)


def _make_step(memory: StepArrays, real: NDArray[np.bool_]) -> EnvStep:
    """Return torch views of a step in memory."""
    reward, terminated, truncated, first, real_ = map(
        torch.from_numpy, (memory.reward, memory.terminated, memory.truncated, memory.first, real)
    )
    observation = {name: torch.from_numpy(x) for name, x in memory.observation.items()}
    return EnvStep(observation, reward, terminated, truncated, first, real_)
