"""Environments in worker processes, stepped through shared memory; workers that die or hang are replaced."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ludus.core.errors import UserError
from ludus.core.step import EnvStep, Episode
from ludus.core.text import printable
from ludus.core.types import State, Tensors
from ludus.environments.config import EnvConfig
from ludus.environments.goals import has_goals
from ludus.environments.gym import make_environment
from ludus.environments.rows import EnvRows, StepArrays
from ludus.environments.spaces import Arrays
from ludus.environments.worker import STEP
from ludus.managers.base import BatchManager
from ludus.managers.worker_pool import Failed, Part, WorkerPool, split_rows
from ludus.parallel.process import WorkerError
from ludus.parallel.resources import cores

MAX_CHARACTERS = 200  # of an action in messages
WORKER_FAILED = "its worker failed"


class SubProcEnvManager(BatchManager):
    """Steps environments in worker processes, many in each; the steps are those of SimpleEnvManager, row for row.

    ``environment`` is the id or import path, if it is not ``config.id``. With ``config.alternate`` there are two groups
    of rows, and one steps while the actions of the other are computed. A worker whose environment raises, exits,
    crashes or hangs is reported to ``on_warning`` and replaced. Its episodes are lost: their rows start the next ones,
    with ``first`` but without an ending before it.
    """

    def __init__(self, config: EnvConfig, num: int, environment: str = "", branch: int = 0) -> None:
        name = environment.rpartition(":")[2] if environment not in ("", config.id) else config.id
        config = replace(config, id=environment or config.id)
        if config.id.startswith("__main__:"):
            raise UserError(
                f"env.backend is subproc, but {name} is defined in an interactive session, from which no other "
                "process can import it; put it into a file, or set env.backend to simple."
            )
        if config.alternate and num < 2:
            raise UserError(f"env.alternate needs 2 environments or more, not {num}; raise env.num or turn it off.")
        rows = EnvRows(lambda: make_environment(config), 0, 1, name, config, branch)
        try:  # one environment here, to get the spaces and to check the first reset
            rows.attach(StepArrays.allocate(rows.observation, 1))
            # closed below, but still used for rewards: compute_reward must be a pure function of its arguments
            self._goal_env = rows.env if has_goals(rows.env) else None
        finally:
            rows.close()
        groups = 2 if config.alternate else 1
        cuts = [slice(num * g // groups, num * (g + 1) // groups) for g in range(groups)]
        parts = split_rows(cuts, min(config.workers or cores(), num))
        self._pool = WorkerPool(config, name, parts, num, (rows.observation, rows.action), branch)
        super().__init__(name, num, rows.reader, rows.layout, branch, self._pool.memory, groups, True)
        self.on_warning = lambda report: warnings.warn(printable(report), RuntimeWarning, stacklevel=2)
        self.backend = f"subproc, {self._pool.workers} process{'es' * (self._pool.workers > 1)}"
        self.restarts = 0
        self._reported: Counter[tuple[str, ...]] = Counter()  # by traceback
        self._config, self._parts = config, [[p for p in parts if p.group == g] for g in range(groups)]
        self._targets = [[(key, x[rows]) for key, x in self._pool.actions.items()] for rows in self.groups]
        self._rewards = [self._memory.reward[rows] for rows in self.groups]
        # Parts that start new episodes instead of stepping: at the next send (lost), or already ordered (starting). The
        # values are how many episodes after those in the stats they start.
        self._lost: dict[int, int] = {}
        self._starting: dict[int, int] = {}
        self._in_flight = [False] * groups
        try:
            failed = self._pool.start(range(self._pool.workers))
        except BaseException:
            self.close()
            raise
        if failed:
            self.close()
            error = failed[0][1]
            mistake = UserError(error.user or f"{name}: {error.name} {error.what} when it was started.")
            mistake.details = error.user_stack
            raise mistake

    def send(self, actions: Tensors, group: int = 0) -> None:
        super().send(actions, group)
        pending = self._pending[group]
        for name, target in self._targets[group]:
            target[...] = pending[name]
        self._in_flight[group] = True
        if not self._lost:
            self._pool.step(group)
            return
        for part in self._parts[group]:
            if part.number in self._lost:
                self._order_reset(part, self._lost.pop(part.number))
            else:
                self._pool.order(part.number, STEP)

    def episodes(self) -> list[Episode]:
        self._pool.trim_output()
        return super().episodes()

    def reset(self, seed: int) -> EnvStep:
        self._discard_pending()
        return super().reset(seed)

    def current_call(self) -> tuple[int, ...] | None:
        return None  # ``config.timeout`` applies instead

    def close(self) -> None:
        self._pool.close()

    def state_dict(self) -> State:
        if any(self._in_flight):
            raise RuntimeError("state_dict: a group has been sent and not yet received")
        self._finish_pending()
        return {**super().state_dict(), "restarts": self.restarts}

    def load_state_dict(self, state: State) -> None:
        self._discard_pending()
        self.restarts = int(state.get("restarts", 0))  # absent if the run had another backend
        super().load_state_dict(state)

    def _warning_bits(self) -> int:
        return self._pool.warning_bits

    def _reset_rows(self) -> None:
        parts = self._pool.parts
        for part in parts:
            self._order_reset(part, 0)
        self._wait(parts)
        for part in parts:
            self._stats[part.group].episode[self._rows_in_group(part)] += self._starting.pop(part.number)

    def _step_rows(self, group: int) -> None:
        parts = self._parts[group]
        if failed := self._pool.wait(group, self._config.timeout):
            self._replace_failed(failed)
            self._wait(parts)
        self._in_flight[group] = False
        if self._starting:
            for part in parts:  # the stats add 1 where ``first`` is true
                self._stats[part.group].episode[self._rows_in_group(part)] += self._starting.pop(part.number, 1) - 1
        self._finished += self._stats[group].add(self._rewards[group], self._infos)

    def _infos(self, row: int) -> dict[str, float]:
        size = int(self._pool.infos_size[row])
        if not size:
            return {}
        self._pool.infos_size[row] = 0
        infos: dict[str, float] = json.loads(self._pool.infos[row, :size].tobytes())
        return infos

    def _snapshot(self) -> State:
        """Return the snapshot of each environment; None for rows of failed and of replaced workers.

        Those rows are restored by seed and actions, which are those of the lost episodes.
        """
        pool, taken = self._pool, list[Any]()
        asked = [part for part in pool.parts if pool.is_running(part) and part.number not in self._lost]
        for part in asked:
            self._send(part, do="snapshot")
        failed = pool.wait_all(asked, self._config.timeout)
        dead = {worker for worker, _ in failed}
        for part in pool.parts:
            taken += pool.read_answer(part) if part in asked and part.worker not in dead else [None] * part.count
        self._replace_failed(failed, resume=False)
        return {"rows": taken}

    def _restore(self, snapshot: State) -> dict[int, str]:
        pool, reasons = self._pool, dict[int, str]()
        for part in pool.parts:
            places = [self._saved(row, snapshot["rows"][row]) for row in range(part.rows.start, part.rows.stop)]
            self._send(part, do="restore", rows=places)
        if failed := pool.wait_all(pool.parts, self._config.timeout):
            self._replace_failed(failed)
            self._wait(pool.parts)
        for part in pool.parts:
            starting = self._starting.pop(part.number, 0)
            answers = [WORKER_FAILED] * part.count if starting else pool.read_answer(part)
            for row, reason in enumerate(answers, part.rows.start):
                if reason:
                    stats, index = self._stats_of(row)
                    stats.start_next(index)
                    stats.episode[index] += max(0, starting - 1)
                    reasons[row] = reason
        return reasons

    def _saved(self, row: int, taken: Any) -> tuple[int, bool, Any, Arrays | None]:
        """Return what a worker needs to restore a row."""
        stats, i = self._stats_of(row)
        return int(stats.episode[i]), bool(stats.ended[i]), taken, self._actions(row) if taken is None else None

    def _discard_pending(self) -> None:
        """Wait for pending orders, and discard their results."""
        self._finish_pending()
        self._in_flight = [False] * len(self.groups)
        self._lost, self._starting = {}, {}

    def _finish_pending(self) -> None:
        """Wait for all pending orders; an interrupt may have left more than steps."""
        self._replace_failed(self._pool.wait_for_all(self._config.timeout), resume=False)

    def _wait(self, parts: Sequence[Part]) -> None:
        while failed := self._pool.wait_all(parts, self._config.timeout):
            self._replace_failed(failed)

    def _replace_failed(self, failed: Failed, resume: bool = True) -> None:
        """Report and replace workers; their parts start the next episodes, now if they were pending, else when sent."""
        while failed:
            worker, error = failed.pop()
            own = [part for part in self._pool.parts if part.worker == worker]
            interrupted = [part for part in own if self._pool.is_pending(part)]
            self._report(worker, error)
            for part in own:
                self._pool.infos_size[part.rows] = 0
                if part not in interrupted or not resume:
                    self._lost[part.number] = self._lost.get(part.number, 0) + 1
            if again := self._pool.start([worker]):
                self._pool.mark_pending(interrupted)  # for the next iteration
                failed += again
            elif resume:
                for part in interrupted:
                    self._order_reset(part, self._starting.get(part.number, 0) + 1)

    def _report(self, worker: int, error: WorkerError) -> None:
        self.restarts += 1
        row = self._pool.last_row(worker)
        actions = {name: x[row].tolist() for name, x in self._pool.actions.items()}
        action = str(actions.get("action", actions))
        action = action if len(action) <= MAX_CHARACTERS else f"{action[:MAX_CHARACTERS]}…"
        place = f"environment {row}, episode seed {int(self._memory.seed[row])}, last action {action}"
        sentence = f"{error.name} {error.what}; it was at {place}"
        stack = tuple(line for line in error.details.splitlines() if line.lstrip().startswith('File "'))
        self._reported[stack] += bool(stack)
        if self._reported[stack] > 1:
            self.on_warning(f"{self.name}: {sentence}. The traceback is the same, {self._reported[stack]} times now.")
        else:
            self.on_warning(f"{self.name}: {sentence}.{error.details}")
        most = self._config.max_restarts
        if self.restarts > most:
            raise UserError(
                f"{self.name}: more than {most} environment workers failed (env.max_restarts), the last one so: "
                f"{sentence}; fix the environment, or raise env.max_restarts."
            )

    def _order_reset(self, part: Part, offset: int) -> None:
        """Order a part to start the episodes that are ``offset`` after those in the stats."""
        self._starting[part.number] = offset
        episodes = (self._stats[part.group].episode[self._rows_in_group(part)] + offset).tolist()
        self._send(part, do="begin", episodes=episodes)

    def _send(self, part: Part, **message: Any) -> None:
        about = {"seed": self._seed, "branch": self._branch, "first_row": self.first_row}
        self._pool.send_message(part, about | message)

    def _rows_in_group(self, part: Part) -> slice:
        """Return the rows of a part, counted from the first row of its group."""
        start = part.start - self.groups[part.group].start
        return slice(start, start + part.count)
