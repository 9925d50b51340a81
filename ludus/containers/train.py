"""Training as one call: what ``ludus train`` and ``ludus.train`` both do."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from ludus.containers.build import (
    build_agent,
    build_evaluator,
    build_manager,
    build_updater,
    choose_device,
    choose_engines,
)
from ludus.containers.evaluate import Evaluation
from ludus.containers.local import LocalWorker, OnUpdate
from ludus.containers.player import Player, initialise_from, load
from ludus.containers.report import Reporter
from ludus.containers.settings import Resolved, resolve_settings
from ludus.core.errors import UserError
from ludus.core.names import main_name
from ludus.track.rundir import RunDirectory


class TrainResult(NamedTuple):
    """What came of a run."""

    run: Path  # its folder
    steps: int
    evaluation: Evaluation | None  # the last one
    best: float | None  # the best mean return of an evaluation
    reason: str  # why it ended
    environment: Callable[..., Any] | None = None  # what made the environments, where it was not a name

    def load(self, checkpoint: str = "best") -> Player:
        """The trained policy, ready to act."""
        return load(self.run, checkpoint, environment=self.environment)


def train(
    environment: str | Callable[..., Any],
    agent: str | None = None,
    *,
    nb_step: int | None = None,
    seed: int | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    on_update: OnUpdate | None = None,
) -> TrainResult:
    """Train ``agent`` on ``environment`` and return where the result is.

    ``environment`` is a Gymnasium id, ``package.module:Class``, or a class or function that makes one environment.
    ``settings`` are what the command line has as flags: ``{"agent.learning_rate": 1e-3, "env.num": 16}``.
    ``on_update`` is called after every update with a dict of numbers.
    """
    make = None if isinstance(environment, str) else environment
    name = environment if isinstance(environment, str) else import_path(environment)
    given = {"nb_step": nb_step, "seed": seed}
    overrides = dict(settings or {}) | {key: value for key, value in given.items() if value is not None}
    return train_resolved(resolve_settings(name, agent, preset, config, overrides), on_update, make)


def import_path(thing: Callable[..., Any]) -> str:
    """``module:name`` of a class or function."""
    kind = thing if hasattr(thing, "__qualname__") else type(thing)  # a functools.partial has no name of its own
    module = kind.__module__
    module = main_name() if module == "__main__" else module
    return f"{module}:{kind.__qualname__}"


def train_resolved(
    resolved: Resolved, on_update: OnUpdate | None = None, environment: Callable[..., Any] | None = None
) -> TrainResult:
    """Build everything, run it, and leave a whole run folder whatever happens."""
    settings = resolved.settings
    device, threads = choose_device(settings.device), torch.get_num_threads()
    manager = build_manager(settings, environment)
    try:
        agent = build_agent(settings, manager.observation, manager.action, device)
        manager.use(agent.treatment)
        if settings.init_from:
            initialise_from(agent, settings.init_from, settings.runs)
        updater = build_updater(settings, agent)
        engines = choose_engines(settings, agent, device)
        evaluator = build_evaluator(settings, agent, environment)
    except BaseException:
        manager.close()
        raise
    run = RunDirectory.create(settings.runs, settings.env.id, settings.agent_name)
    origins = resolved.origins | ({} if settings.threads else {"threads": "chosen"})
    reporter = Reporter(run, replace(settings, threads=engines.threads), origins, engines, agent)
    if engines.update == "compiled":
        reporter.note("The update is being compiled: half a minute the first time, seconds after that.")
        updater.compile(on_failure=reporter.note)
    worker = LocalWorker(settings, agent, manager, updater, evaluator, reporter, on_update)
    with _stops_on_signals(worker):
        try:
            worker.run(settings.nb_step)
            if worker.evaluated_at < worker.local_step_count and not worker.stopping.startswith("SIG"):
                worker.evaluate()
            reporter.finish(worker)
        except Exception as error:
            reporter.rescue(worker)
            if isinstance(error, UserError) and not worker.updates:  # nothing was learned: leave no half run behind
                reporter.close()
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        finally:
            worker.close()
            torch.set_num_threads(threads)
    reason = worker.stopping or "all steps are done"
    return TrainResult(run.path, worker.local_step_count, worker.last_evaluation, worker.best, reason, environment)


@contextmanager
def _stops_on_signals(worker: LocalWorker) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run at the next update, with everything saved; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if worker.stopping:
            raise KeyboardInterrupt
        worker.stopping = f"{signal.Signals(number).name} asked for it"

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
