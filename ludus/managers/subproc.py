"""Environments in worker processes, stepped in shared memory; a worker that dies or hangs is replaced."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
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
from ludus.managers.episode_stats import EpisodeStats
from ludus.managers.worker_pool import Failed, Part, WorkerPool, divide
from ludus.parallel.process import WorkerError
from ludus.parallel.resources import cores

LONG = 200  # characters of an action that are shown
FAILED = "its worker failed"


class SubProcEnvManager(BatchManager):
    """W workers with many environments each; the same steps as SimpleEnvManager, row for row.

    ``environment`` is the id or path that it is made from, where that is not ``config.id``.

    With ``config.alternate`` there are two groups of rows, so that one steps while the other's actions are computed. A
    worker whose environment raises, exits, crashes or hangs is reported to ``on_warning`` and replaced; the episodes
    that ran in it are lost: their rows begin the next ones, ``first`` with no ending before it.
    """

    def __init__(self, config: EnvConfig, num: int, environment: str = "", branch: int = 0) -> None:
        name = environment.rpartition(":")[2] if environment not in ("", config.id) else config.id
        config = replace(config, id=environment or config.id)
        if config.id.startswith("__main__:"):
            raise UserError(
                f"env.backend is subproc, but {name} is defined in an interactive session, where no other process "
                "finds it; put it into a file, or set env.backend to simple."
            )
        if config.alternate and num < 2:
            raise UserError(f"env.alternate needs 2 environments or more, not {num}; raise env.num or turn it off.")
        rows = EnvRows(lambda: make_environment(config), 0, 1, name, config.mask, branch)
        try:  # one environment here, to know the spaces and to refuse what a first reset shows to be wrong
            rows.attach(StepArrays.allocate(rows.observation, 1))
            # closed below and yet asked for rewards: compute_reward must be a pure function of its arguments
            self._goal_env = rows.env if has_goals(rows.env) else None
        finally:
            rows.close()
        groups = 2 if config.alternate else 1
        cuts = [slice(num * g // groups, num * (g + 1) // groups) for g in range(groups)]
        parts = divide(cuts, min(config.workers or cores(), num))
        self._pool = WorkerPool(config, name, parts, num, (rows.observation, rows.action), branch)
        super().__init__(name, num, rows.reader, rows.layout, branch, self._pool.memory, groups, replays=True)
        self.on_warning: Callable[[str], None] = _warn
        self.backend = f"subproc, {self._pool.workers} process{'es' * (self._pool.workers > 1)}"
        self.restarts = 0
        self._reported: Counter[tuple[str, ...]] = Counter()  # how often each stack was reported
        self._config, self._parts = config, [[p for p in parts if p.group == g] for g in range(groups)]
        self._targets = [[(key, x[rows]) for key, x in self._pool.actions.items()] for rows in self.groups]
        self._rewards = [self._memory.reward[rows] for rows in self.groups]
        # parts that begin episodes instead of stepping, when sent next (lost) or already sent (begun): part → how far
        # the numbers of these episodes are from those in the account
        self._lost: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        self._flying = [False] * groups
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
        self._flying[group] = True
        if self._lost:
            self._send_lost(group)
        else:
            self._pool.step(group)

    def episodes(self) -> list[Episode]:
        self._pool.relieve()
        return super().episodes()

    def reset(self, seed: int) -> EnvStep:
        self._land()
        return super().reset(seed)

    def current_call(self) -> tuple[int, ...] | None:
        return None  # ``config.timeout`` decides

    def _seed_place(self) -> dict[str, int]:
        """What the seeds of its rows depend on beside the run's."""
        return {"branch": self._branch, "first_row": self.first_row}

    def close(self) -> None:
        self._pool.close()

    def state_dict(self) -> State:
        if any(self._flying):
            raise RuntimeError("state_dict: a group has been sent and not yet received")
        self._finish_pending()
        return {**super().state_dict(), "restarts": self.restarts}

    def load_state_dict(self, state: State) -> None:
        self._land()
        self.restarts = int(state.get("restarts", 0))  # a run may change its backend when it is resumed
        super().load_state_dict(state)

    def _remarks(self) -> int:
        return self._pool.remarks

    def _begin(self) -> None:
        parts = self._pool.parts
        for part in parts:
            self._write_begin(part, 0)
        self._wait(parts)
        for part in parts:
            self._account_rows(part).episode[self._own(part)] += self._begun.pop(part.number)

    def _advance(self, group: int) -> None:
        parts = self._parts[group]
        if failed := self._pool.wait(group, self._config.timeout):
            self._replace_failed(failed)
            self._wait(parts)
        self._flying[group] = False
        if self._begun:
            for part in parts:  # the account will add 1 where ``first`` is true
                self._account_rows(part).episode[self._own(part)] += self._begun.pop(part.number, 1) - 1
        self._note(group, self._rewards[group], self._infos)

    def _infos(self, row: int) -> dict[str, float]:
        size = int(self._pool.infos_size[row])
        if not size:
            return {}
        self._pool.infos_size[row] = 0
        infos: dict[str, float] = json.loads(self._pool.infos[row, :size].tobytes())
        return infos

    def _snapshot(self) -> State:
        """Each environment's own; none of a worker that fails at it or is gone, nor where one has just replaced it.

        These rows come back by seed and actions, which are those of the episodes that were lost.
        """
        pool, taken = self._pool, list[Any]()
        asked = [part for part in pool.parts if pool.mans(part) and part.number not in self._lost]
        for part in asked:
            pool.write(part, {"do": "snapshot", **self._seed_place()})
        failed = pool.wait_all(asked, self._config.timeout)
        dead = {worker for worker, _ in failed}
        for part in pool.parts:
            taken += pool.answer(part) if part in asked and part.worker not in dead else [None] * part.count
        self._replace_failed(failed, go_on=False)
        return {"rows": taken}

    def _restore(self, snapshot: State) -> dict[int, str]:
        pool, reasons = self._pool, dict[int, str]()
        for part in pool.parts:
            places = [self._saved(row, snapshot["rows"][row]) for row in range(part.rows.start, part.rows.stop)]
            pool.write(
                part,
                {
                    "do": "restore",
                    "seed": self._seed,
                    "branch": self._branch,
                    "first_row": self.first_row,
                    "rows": places,
                },
            )
        if failed := pool.wait_all(pool.parts, self._config.timeout):
            self._replace_failed(failed)
            self._wait(pool.parts)
        for part in pool.parts:
            begun = self._begun.pop(part.number, 0)
            answers = [FAILED] * part.count if begun else pool.answer(part)
            for row, why in enumerate(answers, part.rows.start):
                if why:
                    self._lose(row)
                    self._account_of(row).episode[row - self._account_of(row).start] += max(0, begun - 1)
                    reasons[row] = why
        return reasons

    def _saved(self, row: int, taken: Any) -> tuple[int, bool, Any, Arrays | None]:
        """What a worker needs to bring a row back."""
        account = self._account_of(row)
        i = row - account.start
        return int(account.episode[i]), bool(account.ended[i]), taken, self._actions(row) if taken is None else None

    def _land(self) -> None:
        """Forget what is under way, and what was lost."""
        self._finish_pending()
        self._flying = [False] * len(self.groups)
        self._lost, self._begun = {}, {}

    def _finish_pending(self) -> None:
        """Let what is under way come to its end, whatever it is; an interrupt may have left more than steps."""
        self._replace_failed(self._pool.wait_for_all(self._config.timeout), go_on=False)

    def _wait(self, parts: Sequence[Part]) -> None:
        while failed := self._pool.wait_all(parts, self._config.timeout):
            self._replace_failed(failed)

    def _replace_failed(self, failed: Failed, go_on: bool = True) -> None:
        """Report and replace workers; what they were doing begins anew with the next episodes, now or when sent."""
        while failed:
            worker, error = failed.pop()
            own = [part for part in self._pool.parts if part.worker == worker]
            interrupted = [part for part in own if self._pool.busy(part)]
            self._report(worker, error)
            for part in own:
                self._pool.infos_size[part.rows] = 0
                if part not in interrupted or not go_on:
                    self._lost[part.number] = self._lost.get(part.number, 0) + 1
            if again := self._pool.start([worker]):
                self._pool.interrupt(interrupted)  # for the next round of this loop
                failed += again
            elif go_on:
                for part in interrupted:
                    self._write_begin(part, self._begun.get(part.number, 0) + 1)

    def _report(self, worker: int, error: WorkerError) -> None:
        self.restarts += 1
        sentence = f"{error.name} {error.what}; {self._place(worker)}"
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

    def _place(self, worker: int) -> str:
        """Which environment a worker was busy with."""
        row = self._pool.where(worker)
        actions = {name: x[row].tolist() for name, x in self._pool.actions.items()}
        action = str(actions.get("action", actions))
        action = action if len(action) <= LONG else f"{action[:LONG]}…"
        seed = int(self._memory.seed[row])
        return f"it was at environment {row}, episode seed {seed}, last action {action}"

    def _send_lost(self, group: int) -> None:
        for part in self._parts[group]:
            if part.number in self._lost:
                self._write_begin(part, self._lost.pop(part.number))
            else:
                self._pool.order(part.number, STEP)

    def _write_begin(self, part: Part, offset: int) -> None:
        """Order a part to begin the episodes that are so many after those in the account."""
        self._begun[part.number] = offset
        episodes = (self._account_rows(part).episode[self._own(part)] + offset).tolist()
        letter = {
            "do": "begin",
            "seed": self._seed,
            "branch": self._branch,
            "first_row": self.first_row,
            "episodes": episodes,
        }
        self._pool.write(part, letter)

    def _account_rows(self, part: Part) -> EpisodeStats:
        return self._accounts[part.group]

    def _own(self, part: Part) -> slice:
        """The rows of a part within its group."""
        start = part.start - self.groups[part.group].start
        return slice(start, start + part.count)


def _warn(report: str) -> None:
    warnings.warn(printable(report), RuntimeWarning, stacklevel=2)
