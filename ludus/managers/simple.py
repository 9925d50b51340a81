"""Environments in this process, stepped one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ludus.core.types import State
from ludus.environments.config import DEFAULTS, EnvConfig
from ludus.environments.gym import Environment, env_metadata
from ludus.environments.multiagent import JointEnv
from ludus.environments.preprocess import find_wrappers
from ludus.environments.rows import WARNING_BITS, EnvRows
from ludus.managers.base import BatchManager


class SimpleEnvManager(BatchManager):
    """Steps Gymnasium environments in a loop; the seed of an episode is derived from (seed, row, episode)."""

    backend = "simple"

    def __init__(
        self, make: Callable[[], Environment], num: int, name: str, config: EnvConfig = DEFAULTS, branch: int = 0
    ) -> None:
        self._rows = EnvRows(make, 0, num, name, config, branch)
        super().__init__(name, num, self._rows.reader, self._rows.layout, branch, keep_actions=True)
        self._rows.attach(self._memory)
        self._goal_env = self._rows.env
        self.previous_step, self.image_ops = find_wrappers(self._rows.env)
        inner = self._rows.env.unwrapped
        self.joint_env = inner if isinstance(inner, JointEnv) else None

    @property
    def render_fps(self) -> float:  # type: ignore[override]
        """The frames per second in the environment's metadata; 0 if there are none."""
        fps = env_metadata(self._rows.env).get("render_fps")
        return float(fps) if isinstance(fps, int | float | np.number) and 0 < fps < math.inf else 0.0

    def render(self, row: int = 0) -> Any:
        return self._rows.render(row)

    def current_call(self) -> tuple[int, ...] | None:
        return (self.nb_calls, int(self._rows.status[0])) if self._calling else None

    def close(self) -> None:
        self._rows.close()

    def _warning_bits(self) -> int:
        return int(self._rows.status[WARNING_BITS])

    def _reset_rows(self) -> None:
        self._rows.first_row = self.first_row
        self._rows.reset(self._seed, self._stats[0].episode.tolist())

    def _step_rows(self, group: int) -> None:
        infos = self._rows.step(self._pending[group])
        self._finished += self._stats[group].add(self._memory.reward, lambda row: infos.get(row, {}))

    def _snapshot(self) -> State:
        return {"rows": [self._rows.snapshot(row) for row in range(self.batch)]}

    def _restore(self, snapshot: State) -> dict[int, str]:
        self._rows.seed, self._rows.branch, self._rows.first_row = self._seed, self._branch, self.first_row
        stats, reasons = self._stats[0], {}
        for row, taken in enumerate(snapshot["rows"]):
            episode, ended = int(stats.episode[row]), bool(stats.ended[row])
            if reason := self._rows.restore_row(row, episode, ended, taken, self._actions(row)):
                stats.start_next(row)
                reasons[row] = reason
        return reasons
