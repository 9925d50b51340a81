"""Hindsight experience replay (Andrychowicz et al. 2017): replace desired goals by goals achieved later."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.environment import GoalReward
from ludus.core.errors import UserError
from ludus.core.spec import Specs
from ludus.core.step import EnvStep
from ludus.experience.config import ReplayConfig
from ludus.experience.frames import FrameStorage
from ludus.experience.storage import Integers, Ring, SlotIndex

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
RUNNING = -1  # in place of the end of an episode that has not ended
CHECKED = 1_000  # nonzero rewards that are compared with compute_reward

# (achieved [n, …], desired [n, …]) → rewards [n], and whether the episode terminates [n] (None: unknown)
RewardFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class Hindsight:
    """Draws goals that were achieved between a step and the end of its episode.

    Transitions with a new goal terminate where ``reward_fn`` returns that they do. Where it returns None, they keep
    their endings, with one warning. Truncation does not depend on goals and stays.
    """

    def __init__(
        self,
        fraction: float,
        slot_index: SlotIndex,
        ring: Ring,
        frames: FrameStorage | None,
        reward_fn: RewardFunction,
    ) -> None:
        self.reward_fn, self.fraction, self._length = reward_fn, fraction, slot_index.length
        self._slot_index, self._ring, self._frames = slot_index, ring, frames  # frames of achieved goals, if stacked
        self._warned = False
        rows = slot_index.batch
        self._end = np.full((rows, self._length), RUNNING, np.int64)  # time of the last observation of a step's episode
        self._start = np.zeros(rows, np.int64)  # time of the first observation of each row's episode
        self._compared, self._agreed, self._wrong = 0, 0, 0  # rewards compared; equal and not 0; different
        self._last_goal: dict[int, Tensor] = {}  # desired goals of the last step, by first row of the group

    def write(self, rows: Integers, time: int, first: NDArray[np.bool_]) -> None:
        """Record where episodes end: at the observation before ``first``."""
        for row in rows[first].tolist():
            self._close(row, time)
        self._end[rows, time % self._length] = RUNNING

    def check(self, start: int, step: EnvStep, first: NDArray[np.bool_]) -> None:
        """Refuse environments with rewards other than those of ``compute_reward``, as relabelled ones would differ.

        The rewards of the first steps are compared, with the desired goal before or after the step. A few may differ,
        for example by rounding at a distance threshold.
        """
        if self._agreed >= CHECKED:
            return
        achieved, desired = step.observation[ACHIEVED], step.observation[DESIRED]
        before = self._last_goal.get(start, desired)
        self._last_goal[start] = desired.clone()
        real = torch.from_numpy(np.flatnonzero(~first)).to(achieved.device)
        if not len(real):
            return
        given, computed = step.reward[real], self.reward_fn(achieved[real], desired[real])[0].to(step.reward)
        right = torch.isclose(given, computed, 1e-3, 1e-4)
        if not bool(right.all()):
            earlier = self.reward_fn(achieved[real], before[real])[0].to(step.reward)
            right |= torch.isclose(given, earlier, 1e-3, 1e-4)
        self._compared += len(real)
        self._agreed += int((right & (given != 0)).sum())
        self._wrong += int((~right).sum())
        if self._wrong > max(2, self._compared // 100):
            at = int((~right).nonzero()[0])
            raise UserError(
                f"agent.hindsight is {self.fraction:g}, but the environment gave a reward of {float(given[at]):g} "
                f"where compute_reward gives {float(computed[at]):g} for the same goals, as a wrapper does that sums "
                "or scales rewards; give that wrapper its own compute_reward, remove it, or set agent.hindsight to 0."
            )

    def restore(self, rows: slice, low: int, first: NDArray[np.bool_]) -> None:
        """Record the episodes of the times from ``low`` on, given ``first`` ``[rows, times]``."""
        self._end[rows], self._start[rows] = RUNNING, low
        for row, time in np.argwhere(first).tolist():
            self._close(rows.start + row, low + time)

    def _close(self, row: int, time: int) -> None:
        low = max(int(self._start[row]), time - self._length)
        self._end[row, np.arange(low, time) % self._length] = time - 1
        self._start[row] = time

    def relabel(
        self, numbers: Tensor, slots: Tensor, reward: Tensor, terminated: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Give some of the items at ``slots`` ``[n + 1, M]`` new goals; return which items ``[m]``, and the goals.

        Their rewards and terminations ``[n, M]`` are overwritten: they depend on the goal achieved after each step.
        """
        time, row = self._slot_index.split(numbers.numpy())
        chosen, times = self._draw(time, row, generator)
        which = torch.from_numpy(chosen).to(slots.device)
        goal = self._achieved(torch.from_numpy(row[chosen] * self._length + times % self._length).to(slots.device))
        if len(chosen):
            successors = slots[1:, which]  # [n, m]
            desired = goal.expand(len(successors), *goal.shape).flatten(0, 1)
            computed, ends = self.reward_fn(self._achieved(successors.flatten()), desired)
            reward[:, which] = computed.view(successors.shape).to(reward)
            if ends is not None:
                terminated[:, which] = ends.view(successors.shape)
            else:
                self._warn_if_terminated(terminated[:, which])
        return which, goal

    @staticmethod
    def set_goals(batch: Batch, which: Tensor, goal: Tensor) -> None:
        """Set the goals that ``relabel`` returned."""
        batch.observation[DESIRED][:, which] = goal
        if batch.window:
            batch.window[f"observation/{DESIRED}"][:, which] = goal

    def _draw(self, time: Integers, row: Integers, generator: torch.Generator) -> tuple[Integers, Integers]:
        """Choose some of the transitions at (``time``, ``row``); return which, and the times of their new goals.

        Goals are drawn uniformly from t + 1 to the end of the episode ("future").
        """
        chance, position = torch.rand(2, len(time), dtype=torch.float64, generator=generator).numpy()
        chosen = np.flatnonzero(chance < self.fraction)
        start, rows = time[chosen], row[chosen]
        end = self._end[rows, start % self._length]
        left = np.where(end == RUNNING, self._slot_index.now[rows], end) - start
        return chosen, start + 1 + np.minimum((position[chosen] * left).astype(np.int64), left - 1)

    def _achieved(self, slots: Tensor) -> Tensor:
        """Return a copy of the achieved goals ``[len(slots), …]``."""
        if self._frames is not None:
            return self._frames.read(slots[None])[0].clone()
        return self._ring.flat[f"observation/{ACHIEVED}"].index_select(0, slots)

    def _warn_if_terminated(self, terminated: Tensor) -> None:
        """Warn once that relabelled transitions keep the endings of their old goals."""
        if not self._warned and bool(terminated.any()):
            self._warned = True
            warnings.warn(
                "agent.hindsight: episodes terminate, but the environment has no compute_terminated(achieved_goal, "
                "desired_goal, info), so transitions keep their endings with new goals too; give it one if endings "
                "depend on the goal.",
                RuntimeWarning,
                stacklevel=2,
            )


def tensor_reward(goal_reward: GoalReward) -> RewardFunction:
    """Wrap the environments' numpy ``compute_reward`` for tensors on any device."""

    def compute(reached: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        reward, ends = goal_reward(reached.cpu().numpy(), wanted.cpu().numpy())
        device = reached.device
        return torch.from_numpy(reward).to(device), None if ends is None else torch.from_numpy(ends).to(device)

    return compute


def check_hindsight(config: ReplayConfig, observation: Specs, reward_fn: RewardFunction | None) -> None:
    """Refuse hindsight without goals, or without a function for their rewards."""
    if not config.hindsight:
        return
    what = f"agent.hindsight is {config.hindsight:g}, but"
    if config.sequence:
        raise UserError(f"{what} it works on single transitions; set agent.sequence to 0, or agent.hindsight to 0.")
    missing = [name for name in (ACHIEVED, DESIRED) if name not in observation]
    if missing:
        raise UserError(
            f'{what} the environment has no observation "{missing[0]}" (it has {", ".join(observation)}); set it to 0.'
        )
    if any(spec.masks in (ACHIEVED, DESIRED) for spec in observation.values()):
        raise UserError(f"{what} {ACHIEVED} or {DESIRED} is a list of variable length; give goals a fixed size.")
    if observation[ACHIEVED].shape != observation[DESIRED].shape:
        raise UserError(
            f"{what} {ACHIEVED} has shape {observation[ACHIEVED].shape} and {DESIRED} {observation[DESIRED].shape}; "
            "give both the same shape, or set it to 0."
        )
    if reward_fn is None:
        raise UserError(
            f"{what} the environment has no compute_reward(achieved_goal, desired_goal, info) for the rewards of new "
            "goals; give it one, or set it to 0."
        )
