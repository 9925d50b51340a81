"""Hindsight experience replay (Andrychowicz et al. 2017): what was reached becomes what was wanted."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.errors import UserError
from ludus.core.spec import Specs
from ludus.core.step import EnvStep
from ludus.experience.config import ReplayConfig
from ludus.experience.row_group import Integers

REACHED, WANTED = "achieved_goal", "desired_goal"
OPEN = -1  # the end of an episode that goes on
CHECKED = 1_000  # rewards other than 0 that are compared with compute_reward before it is trusted

# of goals reached [n, …] and wanted [n, …]: rewards [n], and whether the episode terminates [n] (None: nothing tells)
RewardFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class Hindsight:
    """Knows where each step's episode ends, and draws a goal that was reached between the step and that end.

    With a new goal, what ``judge`` says holds: a transition that reaches it terminates if the environment would have
    ended there, and one that terminated for the old goal goes on. Where nothing tells endings, transitions keep
    theirs, of which there is one warning. Truncation has nothing to do with goals and stays.
    """

    def __init__(self, share: float, length: int, batch: int, judge: RewardFunction) -> None:
        self.judge, self._share, self._length = judge, share, length
        self._warned = False
        self._end = np.full((batch, length), OPEN, np.int64)  # the time of the last observation of a step's episode
        self._since = np.zeros(batch, np.int64)  # where each row's episode began
        self._compared, self._agreed, self._wrong = 0, 0, 0  # rewards written, those of them that are not 0 and right
        self._wanted: dict[int, Tensor] = {}  # the goal of each row's last observation, by its first row

    def write(self, rows: Integers, time: int, fresh: NDArray[np.bool_]) -> None:
        """Note where episodes end: at the observation before a ``fresh`` one."""
        for row in rows[fresh].tolist():
            self._close(row, time)
        self._end[rows, time % self._length] = OPEN

    def check(self, start: int, step: EnvStep, fresh: NDArray[np.bool_]) -> None:
        """Refuse environments whose rewards are not those of ``compute_reward``: new goals would have another scale.

        Compares the rewards of the first steps. Either the goal before a step or the one after it may be meant. A
        few may differ, as a distance does that is rounded at a threshold.
        """
        if self._agreed >= CHECKED:
            return
        reached, wanted = step.observation[REACHED], step.observation[WANTED]
        before = self._wanted.get(start, wanted)
        self._wanted[start] = wanted.clone()
        real = torch.from_numpy(np.flatnonzero(~fresh)).to(reached.device)
        if not len(real):
            return
        given, found = step.reward[real], self.judge(reached[real], wanted[real])[0].to(step.reward)
        right = torch.isclose(given, found, 1e-3, 1e-4)
        if not bool(right.all()):
            earlier = self.judge(reached[real], before[real])[0].to(step.reward)
            right |= torch.isclose(given, earlier, 1e-3, 1e-4)
        self._compared += len(real)
        self._agreed += int((right & (given != 0)).sum())
        self._wrong += int((~right).sum())
        if self._wrong > max(2, self._compared // 100):
            at = int((~right).nonzero()[0])
            raise UserError(
                f"agent.hindsight is {self._share:g}, but the environment gave a reward of {float(given[at]):g} where "
                f"compute_reward gives {float(found[at]):g} for the same goals, as a wrapper does that sums or scales "
                "rewards; give that wrapper a compute_reward of its own, leave it out, or set agent.hindsight to 0."
            )

    def restore(self, rows: slice, low: int, first: NDArray[np.bool_]) -> None:
        """Note the episodes of times from ``low`` on, by their beginnings ``[rows, times]``."""
        self._end[rows], self._since[rows] = OPEN, low
        for row, time in np.argwhere(first).tolist():
            self._close(rows.start + row, low + time)

    def _close(self, row: int, time: int) -> None:
        low = max(int(self._since[row]), time - self._length)
        self._end[row, np.arange(low, time) % self._length] = time - 1
        self._since[row] = time

    def draw(self, time: Integers, row: Integers, now: Integers, generator: torch.Generator) -> tuple[Integers, ...]:
        """Choose some of the transitions at (``time``, ``row``); return which, and when each reached its new goal.

        ``now`` is the time of each row's last observation. The goal's time is t + 1 or later, in the same episode, each
        with equal chance ("future").
        """
        chance, moment = torch.rand(2, len(time), dtype=torch.float64, generator=generator).numpy()
        chosen = np.flatnonzero(chance < self._share)
        start = time[chosen]
        end = self._end[row[chosen], start % self._length]
        left = np.where(end == OPEN, now[chosen], end) - start
        return chosen, start + 1 + np.minimum((moment[chosen] * left).astype(np.int64), left - 1)

    def keep(self, terminated: Tensor) -> None:
        """Warn, once, if transitions with new goals ``terminated`` with their old ones and nothing tells endings."""
        if not self._warned and bool(terminated.any()):
            self._warned = True
            warnings.warn(
                "agent.hindsight: episodes terminate, but the environment has no compute_terminated(achieved_goal, "
                "desired_goal, info), so transitions keep their endings with new goals too; give it one if endings "
                "depend on the goal.",
                RuntimeWarning,
                stacklevel=2,
            )


def refuse_hindsight(config: ReplayConfig, observation: Specs, reward: RewardFunction | None) -> None:
    """Refuse hindsight where there are no goals, or rewards cannot be told anew."""
    if not config.hindsight:
        return
    what = f"agent.hindsight is {config.hindsight:g}, but"
    if config.sequence:
        raise UserError(f"{what} it works on single transitions; set agent.sequence to 0, or agent.hindsight to 0.")
    missing = [name for name in (REACHED, WANTED) if name not in observation]
    if missing:
        raise UserError(
            f'{what} the environment has no observation "{missing[0]}" (it has {", ".join(observation)}); set it to 0.'
        )
    if observation[REACHED].shape != observation[WANTED].shape:
        raise UserError(
            f"{what} {REACHED} has shape {observation[REACHED].shape} and {WANTED} {observation[WANTED].shape}; give "
            "both one shape, or set it to 0."
        )
    if reward is None:
        raise UserError(
            f"{what} the environment has no compute_reward(achieved_goal, desired_goal, info) to tell rewards anew; "
            "give it one, or set it to 0."
        )
