"""Training in one process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ludus.containers.build import make_actor
from ludus.containers.evaluate import Evaluation, Evaluator
from ludus.containers.hook import HOOK, OnUpdate, UpdateHook, UpdateNumbers
from ludus.containers.learner import SeatLearner
from ludus.containers.loop import begin, collect, improve
from ludus.containers.resumable import ResumableWorker
from ludus.containers.roles import role_settings
from ludus.containers.self_play import start_self_play
from ludus.containers.team import Team, members
from ludus.containers.updater import LocalUpdater
from ludus.core.agent import Agent
from ludus.core.environment import DEFAULT_ROLE, EnvironmentManager
from ludus.core.rows import Rows
from ludus.core.step import Episode
from ludus.core.types import Tensors
from ludus.core.updater import Updater
from ludus.logging.clock import Clock
from ludus.logging.episodes import RecentEpisodes
from ludus.networks.placement import device_of
from ludus.parallel.orphans import StartedProcesses
from ludus.settings.settings import Settings

if TYPE_CHECKING:
    from ludus.containers.network_check import NetworkCheck, NetworkReport
    from ludus.runs.report import Reporter


class LocalWorker(ResumableWorker):
    """Trains an agent in one process: collects, improves, evaluates, logs and saves.

    With several roles, ``agent`` is a team, and there is an updater and a learner for each role; all collect in the
    same environments, then each learns from its own cache. ``environments`` are the manager's in the whole run, by
    default all.
    """

    can_rescue = True  # whether the state can be saved in the middle of an update

    def __init__(
        self,
        settings: Settings[Any],
        agent: Agent,
        manager: EnvironmentManager,
        updater: Updater | Mapping[str, Updater],
        evaluator: Evaluator,
        on_update: OnUpdate | None = None,
        environments: Rows | None = None,
    ) -> None:
        self.environments = Rows.all(manager.batch) if environments is None else environments
        manager, self.pool = start_self_play(settings, agent, manager, evaluator, self.environments)
        self.settings, self.agent, self.manager, self.evaluator = settings, agent, manager, evaluator
        self._hook = None if on_update is None else UpdateHook(on_update)
        self.reporter: Reporter | None = None  # None: no output and no run folder
        self.started = StartedProcesses()  # child processes of environments, ended with the run
        self.compiling = False
        self.device = device_of(agent)
        seeds = torch.Generator().manual_seed(settings.seed)
        self.env_seed, *self.seeds = torch.randint(2**31 - 1, (4,), generator=seeds).tolist()
        self.actor = make_actor(agent, manager)  # what plays whole environments in evaluations
        self.learners = self._make_learners(updater if isinstance(updater, Mapping) else {DEFAULT_ROLE: updater})
        self.seats = [learner.seat for learner in self.learners]
        first = self.learners[0]  # the only one, unless there are several roles
        self.seat, self.cache, self.updater, self.guard = first.seat, first.cache, first.updater, first.guard
        self.clock = Clock()
        self.network_check: NetworkCheck | None = None
        self.local_step_count, self.updates = 0, 0
        self.episodes = RecentEpisodes()
        self.best: float | None = None
        self.last_evaluation: Evaluation | None = None
        self.evaluated_at = -1
        self.stopping = ""  # the reason to end before nb_step: a signal, on_update or a reached target
        self.began, self._target = False, settings.nb_step
        self.in_call = False  # interrupted inside a call of an environment, so the cache is consistent
        self.between, self.owed = True, False  # between updates; an evaluation is due (again)
        self._agree: Callable[[bool], bool] = bool  # of ``collect``

    def _make_learners(self, updaters: Mapping[str, Updater]) -> list[SeatLearner]:
        learners, agents = list[SeatLearner](), members(self.agent)
        for number, (role, settings) in enumerate(role_settings(self.settings, self.manager.roles).items()):
            rows, seeds = self._rows_of(role, settings), [seed + number for seed in self.seeds]
            prefix = f"{role}/" if self.settings.roles.agents else ""
            parts = (settings, agents[role], self.manager, updaters[role], rows, seeds)
            learners.append(SeatLearner(*parts, role, prefix))
        return learners

    def _rows_of(self, role: str, settings: Settings[Any]) -> Rows:
        """Return the rows that a role's cache holds in this process."""
        return self.environments.times(self.manager.roles[role].agents)

    @classmethod
    def make_updaters(cls, agent: Agent | Team, settings: Settings[Any]) -> Mapping[str, LocalUpdater]:
        """Make the updater of each role for this kind of container."""
        return {role: LocalUpdater(member) for role, member in members(agent).items()}

    def start(self, settings: Settings[Any], stack: ExitStack) -> None:
        """Start what runs beside this process, with these settings; ``stack`` ends it."""
        return

    def run(self, nb_step: int, initial_step: int = 0) -> Self:
        """Collect and improve until ``nb_step`` environment steps are done, or something asks to stop."""
        self.local_step_count, self._target = initial_step, nb_step
        if not self.began:
            if self.pool is not None and not self.pool.members:
                self.pool.add(initial_step)
            with self.started:
                self._begin()
            self.began = True
        if self.owed:
            self.evaluate()
        while self.local_step_count < nb_step and not self._stops():
            for learner in self.learners:
                learner.schedule(self.local_step_count / self.settings.nb_step)
            before, self.between, self.in_call = self.local_step_count, False, False
            steps = self._collect()
            metrics, updates = self._improve(before + steps)
            self.local_step_count += steps
            self.updates += updates
            self.between = True
            self._after_update(before, metrics)
        return self

    def _begin(self) -> None:
        begin(self, self.env_seed)

    def _stops(self) -> bool:
        """Return whether something asks to end the run before ``nb_step``."""
        return bool(self.stopping)

    def _collect(self) -> int:
        """Collect experience; return the number of environment steps."""
        with self.started:
            return collect(self, self._agree)

    def _improve(self, step: int) -> tuple[Tensors, int]:
        """Learn; ``step`` is the number of environment steps so far."""
        metrics, count, check = dict[str, Tensor](), 0, self.network_check
        with nullcontext() if check is None else check.watch(step, self.updates, self._checked):
            for learner in self.learners:
                learner.guard.step = step
                found, updates = improve(learner)
                metrics |= learner.keep(found) if learner.prefix else found
                count += updates
        self.clock.lap("learning")
        return metrics, count

    def _checked(self, report: NetworkReport) -> None:
        if self.reporter is not None:
            self.reporter.checked(report)

    def _after_update(self, before: int, metrics: Tensors) -> None:
        settings, episodes = self.settings, self._episodes()
        if self.pool is not None:
            episodes = self.pool.rate(episodes)
            if self._passed(before, settings.self_play.every):
                self.pool.add(self.local_step_count)
        if episodes and (warning := self.agent.episode_warning(episodes)) and self.reporter is not None:
            self.reporter.warn(warning)
        self.episodes.add(episodes)
        ends = self.local_step_count >= self._target
        log_due = bool(settings.log_every) and (ends or self._passed(before, settings.log_every))
        self.owed = evaluation_due = self._passed(before, settings.evaluation.every)
        save_due = self._passed(before, settings.checkpoint_every)
        if log_due or self._hook is not None:
            values = UpdateNumbers(self.local_step_count, metrics, self.progress)
            if log_due:
                values.add(self.episodes.take_infos())
                self._log({k: x for k, x in values.items() if k != "step"})
            if self._hook is not None:
                if reason := self._hook(values, self):
                    self.stopping = reason
                alive = weakref.ref(values)
                del values
                if (kept := alive()) is not None:  # the hook kept a reference: convert them now
                    kept.compute()
        if self.reporter is not None:
            self.reporter.show(self)
        self.clock.lap("other")
        if evaluation_due:
            self.evaluate()
        if save_due:
            self._save()
        self.clock.lap("other")

    def _episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call."""
        return self.manager.episodes()

    def _save(self) -> None:
        if self.reporter is not None:
            self.reporter.checkpoint(self)

    def _log(self, metrics: dict[str, float]) -> None:
        if self.reporter is not None:
            self.reporter.log(self.local_step_count, metrics)

    @property
    def backend(self) -> str:
        """How environments are stepped, for the user."""
        return self.manager.backend

    def advice(self) -> str:
        """Return what would make the run faster, for the user; empty if nothing is known."""
        return ""

    @property
    def diverged(self) -> bool:
        """Whether training ended at a loss or gradient that is not finite."""
        return any(learner.guard.diverged for learner in self.learners)

    @property
    def keeps_failures(self) -> bool:
        """Whether a failed update is saved for ``ludus diagnose``, which recomputes that of a single agent."""
        return not self.settings.roles.agents

    @property
    def interrupted(self) -> bool:
        """Whether a signal or ``on_update`` ended the run, so that a resume continues it."""
        return self.stopping.startswith(("SIG", HOOK))

    def _passed(self, before: int, every: int) -> bool:
        return bool(every) and self.local_step_count // every > before // every

    def progress(self) -> dict[str, float]:
        """Return the metrics of the loop: schedules, updates, cache and episodes."""
        learned = {name: x for learner in self.learners for name, x in learner.progress().items()}
        games = {} if self.pool is None else self.pool.metrics()
        return {**learned, "updates": float(self.updates), **self.episodes.means(), **games}

    def evaluate(self) -> Evaluation | None:
        """Evaluate, keep the best policy, and stop at the target return; None if interrupted."""
        self.clock.lap("other")
        with self.started:
            evaluation = self.evaluator.run(self.actor, self.device, self._interrupts_evaluation)
        self.clock.lap("evaluation")
        if evaluation is None:
            return None
        # opponents change; of equal policies the last is kept, since in zero-sum games the mean is always 0
        better = self.pool is not None or self.best is None or evaluation.mean >= self.best
        if self.reporter is not None:
            self.reporter.evaluated(self, evaluation, better)
        self.evaluator.round += 1  # counted after the report: if that fails, a resume repeats it
        self.last_evaluation, self.evaluated_at, self.owed = evaluation, self.local_step_count, False
        self._use_return(evaluation.mean)
        self.best = evaluation.mean if better else self.best
        target = self.settings.evaluation.stop_at
        if target is not None and evaluation.mean >= target:
            self.stopping = f"the evaluation reached {target:g}"
        return evaluation

    def _use_return(self, mean: float) -> None:
        """Let learning rates follow the mean return of an evaluation."""
        for learner in self.learners:
            learner.updater.add_return(mean)

    def _interrupts_evaluation(self) -> bool:
        return bool(self.stopping)

    def current_call(self) -> tuple[int, ...] | None:
        """What environments in this process are doing now: changes as they go on; None where none is being called."""
        return self.manager.current_call() or self.evaluator.current_call()

    def longest_call(self) -> float:
        """Seconds of the longest step or reset of environments in this process so far."""
        return max(self.manager.longest_call, self.evaluator.longest_call)

    def finish(self) -> None:
        """Do what remains after the last checkpoint."""
        return

    def close(self) -> None:
        """Close the environments and the reporter."""
        with ExitStack() as stack:  # closes all even if one raises
            stack.callback(self.started.end)
            for part in (self.reporter, self.evaluator, self.manager):
                if part is not None:
                    stack.callback(part.close)
