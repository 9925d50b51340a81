"""Training in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch

from ludus.containers.blackbox import BlackBox
from ludus.containers.evaluate import Evaluation, Evaluator
from ludus.containers.loop import begin, collect, improve
from ludus.containers.report import Reporter
from ludus.containers.settings import Settings
from ludus.containers.state import INFOS, restore_worker, worker_state
from ludus.core.agent import Agent, Container, ExperienceCache, Updater
from ludus.core.environment import EnvironmentManager
from ludus.core.types import EnvStep, HiddenState, State, Tensors
from ludus.track.clock import Clock

OnUpdate = Callable[[dict[str, float]], Any]
RECENT = 100  # episodes whose mean is shown


class LocalWorker(Container):
    """Holds the agent, its environments and everything between them; one process, one loop."""

    def __init__(
        self,
        settings: Settings[Any],
        agent: Agent,
        manager: EnvironmentManager,
        updater: Updater,
        evaluator: Evaluator,
        on_update: OnUpdate | None = None,
    ) -> None:
        self.settings, self.agent, self.manager = settings, agent, manager
        self.updater: Updater = updater
        self.evaluator, self.on_update = evaluator, on_update
        self.reporter: Reporter | None = None  # without one it trains in silence
        self.device = next(agent.parameters()).device
        seeds = torch.Generator().manual_seed(settings.seed)
        env_seed, noise_seed, batch_seed = torch.randint(2**31 - 1, (3,), generator=seeds).tolist()
        self.env_seed = env_seed
        self.noise = agent.make_noise(manager.batch, torch.Generator(self.device).manual_seed(noise_seed))
        if (shuffle := getattr(agent, "generator", None)) is not None:
            shuffle.manual_seed(batch_seed)
        self.cache: ExperienceCache = agent.make_cache(manager.batch)
        self.clock = Clock()
        self.black_box = BlackBox(agent, updater, manager)
        self.env_step: EnvStep
        self.hidden_state = HiddenState()
        self.local_step_count, self.updates = 0, 0
        self.reward_buffer: deque[float] = deque(maxlen=RECENT)
        self.length_buffer: deque[float] = deque(maxlen=RECENT)
        self.infos: dict[str, deque[float]] = {}  # of the episodes since the last log
        self.best: float | None = None
        self.last_evaluation: Evaluation | None = None
        self.evaluated_at = -1
        self.stopping = ""  # why the run ends before nb_step: set by a signal or a reached target
        self.began, self._target = False, settings.nb_step
        self.between = True  # updates: what is saved then continues exactly
        self.owed = False  # an evaluation that a signal kept from its end

    def run(self, nb_step: int, initial_step: int = 0) -> Self:
        """Collect and improve until ``nb_step`` real decisions are done, or something asks to stop."""
        self.local_step_count, self._target = initial_step, nb_step
        if not self.began:
            begin(self, self.env_seed)
            self.began = True
        if self.owed:
            self.evaluate()
        while self.local_step_count < nb_step and not self.stopping:
            scheduled = dict(self.agent.schedule(self.local_step_count / self.settings.nb_step))
            self.updater.learning_rate = scheduled.get("learning_rate", self.updater.learning_rate)
            before, self.between = self.local_step_count, False
            decisions = collect(self)
            self.black_box.step = before + decisions
            metrics = improve(self)
            self.local_step_count += decisions
            self.updates += 1
            self.between = True
            self._after_update(before, metrics)
        return self

    def _after_update(self, before: int, metrics: Tensors) -> None:
        self._note_episodes()
        settings = self.settings
        ends = self.local_step_count >= self._target
        log_due = bool(settings.log_every) and (ends or self._passed(before, settings.log_every))
        self.owed = evaluation_due = self._passed(before, settings.evaluation.every)
        save_due = self._passed(before, settings.checkpoint_every)
        if log_due or evaluation_due or save_due or self.on_update is not None:
            values = {name: float(x) for name, x in metrics.items()} | self.progress()
            if log_due:
                infos, self.infos = self.infos, {}
                values |= {name: sum(xs) / len(xs) for name, xs in infos.items()}
                if self.reporter is not None:
                    self.reporter.log(self.local_step_count, values)
            if self.on_update is not None:
                self.on_update({"step": float(self.local_step_count)} | values)
        if self.reporter is not None:
            self.reporter.show(self)
        self.clock.lap("other")
        if evaluation_due:
            self.evaluate()
        if self.reporter is not None and save_due:
            self.reporter.checkpoint(self)
        self.clock.lap("other")

    def _passed(self, before: int, every: int) -> bool:
        return bool(every) and self.local_step_count // every > before // every

    def _note_episodes(self) -> None:
        for episode in self.manager.episodes():
            self.reward_buffer.append(episode.reward)
            self.length_buffer.append(episode.length)
            for name, x in episode.infos.items():
                self.infos.setdefault(f"episode/{name}", deque(maxlen=INFOS)).append(x)

    def progress(self) -> dict[str, float]:
        """The numbers of the loop itself."""
        values = {"learning_rate": self.updater.learning_rate, "updates": float(self.updates)}
        if self.reward_buffer:
            values["return"] = sum(self.reward_buffer) / len(self.reward_buffer)
            values["length"] = sum(self.length_buffer) / len(self.length_buffer)
        return values

    def evaluate(self) -> Evaluation | None:
        """Play fresh episodes, keep the best policy, and stop where the target is reached; None if told to stop."""
        evaluation = self.evaluator.run(self.agent, self.device, lambda: self.stopping)
        if evaluation is None:
            return None
        better = self.best is None or evaluation.mean > self.best
        if self.reporter is not None:
            self.reporter.evaluated(self, evaluation, better)
        self.evaluator.round += 1  # counted only once it is told: one that fails to be is played again
        self.last_evaluation, self.evaluated_at, self.owed = evaluation, self.local_step_count, False
        self.best = evaluation.mean if better else self.best
        target = self.settings.evaluation.stop_at
        if target is not None and evaluation.mean >= target:
            self.stopping = f"the evaluation reached {target:g}"
        self.clock.lap("other")
        return evaluation

    def state_dict(self) -> State:
        """All that a resume needs."""
        return worker_state(self)

    def load_state_dict(self, state: State) -> str:
        """Take over a run where ``state_dict`` saw it; return how the environments came back."""
        return restore_worker(self, state)

    def close(self) -> None:
        """Close the environments and what reports."""
        with ExitStack() as stack:  # one that fails does not keep the others from closing
            for part in (self.reporter, self.evaluator, self.manager):
                if part is not None:
                    stack.callback(part.close)
