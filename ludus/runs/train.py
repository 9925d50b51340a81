"""Train and resume: the functions behind ``ludus train``, ``ludus resume`` and their Python counterparts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ludus.agents import AGENTS
from ludus.containers import CONTAINERS
from ludus.containers.build import (
    build_cache,
    build_evaluator,
    build_manager,
    decide_sharing,
    divide_environments,
    flattened_maps,
    linear_networks,
    make_actor,
)
from ludus.containers.datasets import check_dataset_use, give_dataset
from ludus.containers.distrib import build_rank, decide_ranks, rank_device
from ludus.containers.evaluate import Evaluation
from ludus.containers.guard import TrainingFailed
from ludus.containers.hang import warn_of_hangs
from ludus.containers.hook import OnUpdate
from ludus.containers.impala import refuse_unsuitable_agents
from ludus.containers.local import LocalWorker
from ludus.containers.network_check import NetworkCheck
from ludus.containers.rank_processes import refuse_local_code
from ludus.containers.ranks import RankGroup, torchrun
from ludus.containers.roles import adapt_to_manager, build_learners, choose_all_engines, outline_learners
from ludus.containers.self_play import make_games
from ludus.containers.signals import StopOnSignals, without_signals
from ludus.containers.threads import VARIABLE, requested_threads, use_threads
from ludus.containers.updater import LocalUpdater
from ludus.core.agent import Agent
from ludus.core.environment import DEFAULT_ROLE
from ludus.core.errors import UserError
from ludus.core.imports import check_not_importing, import_path, resolve
from ludus.core.rows import Rows
from ludus.core.text import printable
from ludus.data.load import MINARI
from ludus.environments.errors import user_traceback
from ludus.logging.logfile import LogFile
from ludus.logging.remote import RemoteConsole, RemoteTerminal
from ludus.managers.make import make_manager
from ludus.parallel.orphans import StartedProcesses
from ludus.preprocess.rewards import make_reward_ops
from ludus.runs.failure import save_failure
from ludus.runs.folder import LATEST, RunDirectory
from ludus.runs.host import Order, run_in_cluster
from ludus.runs.initialise import Transfer, initialise_from
from ludus.runs.open_run import SavedRun, max_checkpoint_bytes, open_run, open_saved
from ludus.runs.opponents import PoolFolder
from ludus.runs.policy import Player, agent_of_checkpoint, load, refuse_mismatch
from ludus.runs.record import record_run
from ludus.runs.report import Reporter
from ludus.runs.teacher import give_teacher
from ludus.settings.settings import Resolved, Settings, class_overrides, from_flat, resolve_settings, to_flat
from ludus.settings.trust import find_imports


class TrainResult(NamedTuple):
    """The result of a run."""

    run: Path  # its folder
    steps: int
    evaluation: Evaluation | None  # the last one
    best: float | None  # highest mean return of an evaluation
    reason: str  # why it ended
    environment: Callable[..., Any] | None = None  # creates an environment, if training was given a callable

    def load(self, checkpoint: str = "best") -> Player:
        """Load the trained policy."""
        return load(self.run, checkpoint, environment=self.environment, trust=True)  # made by this process


def train(
    environment: str | Callable[..., Any],
    agent: str | type[Any] | None = None,
    *,
    network: str | type[Any] | None = None,
    nb_step: int | None = None,
    seed: int | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    container: str | None = None,
    ranks: int | None = None,
    settings: Mapping[str, Any] | None = None,
    on_update: OnUpdate | None = None,
    trust: bool = False,
) -> TrainResult:
    """Train ``agent`` on ``environment`` in a new run folder.

    ``environment`` is a Gymnasium id, ``package.module:Class``, or a class or function that creates one environment;
    ``agent`` and ``network`` are names from ``ludus list``, ``package.module:Class``, or classes.
    ``settings`` are the flags of the command line: ``{"agent.learning_rate": 1e-3, "env.num": 16}``. Wrappers and
    parts of networks may be classes there too: ``{"env.wrappers": [MyWrapper]}``.
    ``container`` is how to run (``"local"``, or ``"distrib"`` with this number of ``ranks``).
    ``on_update(metrics, worker)`` or ``on_update(metrics)`` is called after every update; each metric is computed when
    it is read. Return False or raise ``ludus.Stop`` to end the run; it is saved as after Ctrl-C, without a last
    evaluation.
    ``trust``: import the classes that the file ``config`` and the run ``init_from`` name even if this user did not
    write them on this machine.
    """
    check_not_importing("ludus.train")
    make = None if isinstance(environment, str) else environment
    name = environment if isinstance(environment, str) else import_path(environment)
    given = {"nb_step": nb_step, "seed": seed, "network.name": network, "container": container, "ranks": ranks}
    overrides = dict(settings or {}) | {key: value for key, value in given.items() if value is not None}
    resolved = resolve_settings(name, agent, preset, config, overrides, "argument", trust)
    return train_resolved(resolved, on_update, make, trust)


def resume(
    run: str | Path,
    *,
    nb_step: int | None = None,
    stop_at: float | None = None,
    device: str | None = None,
    cluster: str | None = None,
    runs: str = "runs",
    on_update: OnUpdate | None = None,
    environment: Callable[..., Any] | None = None,
    agent: str | type[Any] | None = None,
    network: str | type[Any] | None = None,
    wrappers: Sequence[str | Callable[..., Any]] | None = None,
    trust: bool = False,
) -> TrainResult:
    """Resume a run that was stopped or killed from its newest intact checkpoint; the results are those of one run.

    A complete run is returned unchanged, unless ``nb_step`` or ``stop_at`` extend it. ``device`` moves the run to
    another device; results may then differ in the last digits. ``cluster`` is another address of the Ray cluster.
    ``environment`` creates one environment, if the one named in the run cannot be imported; ``agent``, ``network`` and
    ``wrappers`` replace the classes named in the run in the same way. ``on_update`` is as in ``train`` and is not saved
    with the run. ``trust``: import the classes that the run names even if this user did not create it on this machine.
    """
    check_not_importing("ludus.resume")
    given = class_overrides(agent, network, wrappers)
    given |= {} if cluster is None else {"impala.cluster": cluster}
    unused = (*given, *(("env.id",) if environment else ()))
    with open_run(run, runs, nb_step, stop_at, device, trust, unused, given, not follows()) as saved:
        if saved.complete:
            return _report_complete(saved, environment)
        resolved = _choose_container(saved.resolved, environment)
        if not resolved.settings.impala.cluster:
            return _train_here(resolved, on_update, environment, trust, saved)
        _check_before_cluster(resolved, environment, trust, saved)
        order = Order(to_flat(resolved.settings), resolved.origins, trust, str(saved.run.path), saved.signs)
    return _train_in_cluster(order, on_update, environment)  # where the host locks the run


def _report_complete(saved: SavedRun, environment: Callable[..., Any] | None) -> TrainResult:
    """Tell that a run is complete; return its result."""
    assert saved.state is not None
    counters, path = saved.state["counters"], saved.run.path
    text = f'The run "{path}" is complete: {saved.complete}.'
    if not follows():
        LogFile(saved.run.log).note(text)
        if not saved.resolved.settings.quiet:
            print(printable(text))
    last = Evaluation(*counters["evaluation"])
    return TrainResult(path, counters["step"], last, counters["best"], f"complete: {saved.complete}", environment)


def train_resolved(
    resolved: Resolved,
    on_update: OnUpdate | None = None,
    environment: Callable[..., Any] | None = None,
    trust: bool = False,
) -> TrainResult:
    """Train with resolved settings in a new run folder.

    ``trust`` the run in ``init_from``. Torch's random state is restored afterwards.
    """
    resolved = _record_data(_locate(_choose_container(resolved, environment)), environment, trust)
    if resolved.settings.impala.cluster:
        _check_before_cluster(resolved, environment, trust)
        order = Order(to_flat(resolved.settings), resolved.origins, trust)
        return _train_in_cluster(order, on_update, environment)
    return _train_here(resolved, on_update, environment, trust)


def _train_here(
    resolved: Resolved,
    on_update: OnUpdate | None,
    environment: Callable[..., Any] | None,
    trust: bool,
    saved: SavedRun | None = None,
    terminal: RemoteTerminal | None = None,
) -> TrainResult:
    """Train in this process, in a new run folder or in that of the ``saved`` run; Torch's random state is restored.

    It is shown on the ``terminal`` of another process if there is one.
    """
    settings = resolved.settings
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(_devices(settings)))
        if follows():
            return _follow(resolved, environment, saved is None, stack)
        torch.manual_seed(settings.seed)  # for networks with random layers, such as dropout
        worker = _build(resolved, on_update, environment, trust, saved, stack, terminal)
        _run(worker, new=saved is None)
    reason = worker.stopping or "all steps done"
    path, steps = worker.reporter.run.path, worker.local_step_count  # type: ignore[union-attr]
    return TrainResult(path, steps, worker.last_evaluation, worker.best, reason, environment)


def _train_in_cluster(order: Order, on_update: OnUpdate | None, environment: Callable[..., Any] | None) -> TrainResult:
    """Train in a host of a Ray cluster."""
    result: TrainResult = run_in_cluster(_train_in_host, order, on_update, environment)
    return result._replace(environment=environment)


def _train_in_host(
    terminal: RemoteTerminal, order: Order, on_update: OnUpdate | None, environment: Callable[..., Any] | None
) -> TrainResult:
    """Train in this process, which is a host in a Ray cluster."""
    resolved = Resolved(from_flat(order.settings), order.origins)
    if not order.run:
        return _train_here(resolved, on_update, environment, order.trust, None, terminal)._replace(environment=None)
    run = RunDirectory(Path(order.run))
    with run.lock(), open_saved(run, resolved, order.signs) as saved:
        if saved.complete:  # the host before it died at the very end
            return _report_complete(saved, None)
        return _train_here(resolved, on_update, environment, order.trust, saved, terminal)._replace(environment=None)


def _check_before_cluster(
    resolved: Resolved, environment: Callable[..., Any] | None, trust: bool, saved: SavedRun | None = None
) -> None:
    """Refuse here what the host would refuse before its first step, so that nobody waits for the cluster first.

    A host that reserves resources may be on a machine with other memory and GPUs, so it checks everything itself.
    """
    settings = resolved.settings
    if settings.impala.host_reserved():
        return
    resolved = Resolved(replace(settings, device="cpu"), resolved.origins)
    with torch.random.fork_rng([]):
        if saved is None:
            check_settings(resolved, trust, environment)
            return
        manager = build_manager(settings, environment)
        try:
            if saved.checkpoint is not None:
                refuse_mismatch(outline_learners(settings, manager), agent_of_checkpoint(saved.checkpoint))
        finally:
            manager.close()


def follows() -> bool:
    """Return whether torchrun started this process as another rank than 0, which neither logs nor saves."""
    place = torchrun()
    return place is not None and place.rank > 0


def _choose_container(resolved: Resolved, environment: Callable[..., Any] | None) -> Resolved:
    """Decide the number of ranks; refuse what other processes cannot run."""
    settings, place = resolved.settings, torchrun()
    if settings.container != "distrib":
        if place is not None and place.ranks > 1:
            raise UserError(
                f"torchrun started {place.ranks} processes, but container is {settings.container}; set it to distrib."
            )
        if settings.container == "impala":
            refuse_local_code(settings, environment, "set container to local")
        return resolved
    if place is None:
        refuse_local_code(settings, environment, "start the ranks with torchrun")
    return decide_ranks(resolved)


def _locate(resolved: Resolved) -> Resolved:
    """Name recorded episodes and other runs by their full paths, so that a resume finds them from any folder."""
    settings, data = resolved.settings, resolved.settings.data

    def find_run(name: str) -> str:
        return str(RunDirectory.open(name, settings.runs).path.absolute())

    agent = settings.agent.locate(find_run)
    if data.path and not data.path.startswith(MINARI):
        below = Path(settings.runs) / data.path
        is_run = data.path == LATEST or Path(data.path).is_dir() or (below.is_dir() and not Path(data.path).exists())
        data = replace(data, path=find_run(data.path) if is_run else str(Path(data.path).absolute()))
    if data.episodes != type(data).episodes and not (data.path and Path(data.path).is_dir()):
        raise UserError(f'data.episodes is {data.episodes}, but data.path is "{data.path}", not a run; leave it out.')
    return Resolved(replace(settings, agent=agent, data=data), resolved.origins)


def _record_data(resolved: Resolved, environment: Callable[..., Any] | None, trust: bool) -> Resolved:
    """Where ``data.path`` is a run, let its best policy play the episodes to learn from, and name their file."""
    settings, data, place = resolved.settings, resolved.settings.data, torchrun()
    if not data.path or not Path(data.path).is_dir():
        return resolved
    check_dataset_use(settings, resolve(settings.agent_name, AGENTS, "agent"))
    if place is not None and place.ranks > 1:
        raise UserError(
            f'data.path is the run "{data.path}", whose episodes every rank that torchrun started would record; record '
            f"them once with `ludus record {data.path} --out FILE.npz`."
        )
    with torch.random.fork_rng(_devices(settings)):
        file = record_run(data.path, data.episodes, settings.runs, settings.device, environment, trust)
    if not settings.quiet:
        print(printable(f'Learning from {data.episodes} episodes of the run "{data.path}", recorded in {file}.'))
    data = replace(data, path=str(file), episodes=type(data).episodes)
    return Resolved(replace(settings, data=data), resolved.origins)


def _devices(settings: Settings[Any]) -> Sequence[int]:
    """Return the GPUs whose random state a run may change."""
    return [] if settings.device == "cpu" else range(torch.cuda.device_count())


def _follow(resolved: Resolved, environment: Callable[..., Any] | None, new: bool, stack: ExitStack) -> TrainResult:
    """Train as a rank that torchrun started beside rank 0."""
    settings, place = resolved.settings, torchrun()
    assert place is not None
    group = RankGroup(place.rank, place.ranks, settings.distrib.timeout)
    stack.callback(group.close)
    worker = build_rank(resolved, group, stack, environment, new)
    group.connect(worker.device)
    with StopOnSignals(worker, lambda: None).handle():
        worker.follow()
    result = worker.result
    last = None if result["evaluation"] is None else Evaluation(*result["evaluation"])
    reason = result["reason"] or "all steps done"
    return TrainResult(Path(result["run"]), result["steps"], last, result["best"], reason, environment)


def _build(
    resolved: Resolved,
    on_update: OnUpdate | None,
    environment: Callable[..., Any] | None,
    trust: bool,
    saved: SavedRun | None,
    stack: ExitStack,
    terminal: RemoteTerminal | None,
) -> LocalWorker:
    """Build all parts, the run folder last, so that an invalid setting leaves no folder behind."""
    settings = resolved.settings
    started = StartedProcesses()
    stack.callback(started.end)  # runs last, after the environments are closed
    kind: type[LocalWorker] = resolve(settings.container, CONTAINERS, "container")
    with started:
        manager = build_manager(settings, environment)
    stack.callback(manager.close)
    if saved is None:
        resolved = adapt_to_manager(resolved, manager)
        settings = resolved.settings
    if saved is not None and saved.checkpoint is not None:
        refuse_mismatch(outline_learners(settings, manager), agent_of_checkpoint(saved.checkpoint))
    agent: Any = build_learners(resolved, manager, rank_device(settings), new=saved is None)
    manager.set_action_transform(agent.action_transform)
    if isinstance(agent, Agent):
        give_teacher(agent, settings, manager, trust)
    sharing = settings if settings.roles.agents else decide_sharing(settings, manager.observation, manager.action)
    transfer: Transfer | None = None
    if settings.init_from and (saved is None or saved.state is None):
        transfer = initialise_from(agent, sharing, trust)
    updaters, engines = kind.make_updaters(agent, settings), choose_all_engines(settings, agent)
    stack.enter_context(use_threads(engines.threads))
    evaluator = build_evaluator(settings, make_actor(agent, manager), environment)
    compiled: Literal["on", "off"] = "on" if engines.update == "compiled" else "off"
    device = str(engines.device) if settings.ranks == 1 else engines.device.type  # each rank has its own GPU
    decided = replace(sharing, threads=engines.threads, compile=compiled, device=device)
    given = to_flat(settings)
    chosen = {key: "chosen" for key, value in to_flat(decided).items() if value != given[key]}
    if "threads" in chosen and requested_threads():
        chosen["threads"] = VARIABLE
    with started:
        worker = kind(settings, agent, manager, updaters, evaluator, on_update)
    stack.callback(worker.close)
    if settings.network_check.every:
        worker.network_check = NetworkCheck(agent, updaters[DEFAULT_ROLE], settings.network_check)
    if worker.pool is not None and saved is not None:
        worker.pool.store = PoolFolder(saved.run)
    early: list[str] = []  # reports before there is a reporter
    worker.manager.on_warning = early.append
    worker.started = started
    with started:
        restored = ""
        if saved is not None and saved.checkpoint is not None:
            if environment is None and not dict(find_imports(given)):
                saved.checkpoint.refuse_larger(max_checkpoint_bytes(worker))
            restored = worker.load_state_dict(saved.checkpoint.read())
    if saved is None:
        run, signs = RunDirectory.create(settings.runs, settings.env.id, settings.agent_names, settings.name), True
        stack.enter_context(run.lock())
    else:
        run, signs = saved.run, saved.signs
    run.mark_used()
    if worker.pool is not None:
        worker.pool.store = folder = PoolFolder(run)
        folder.forget_after(worker.local_step_count)
    origins = resolved.origins | chosen
    console = None if terminal is None else RemoteConsole(terminal)
    step, backend = worker.local_step_count, worker.backend
    reporter = Reporter(run, decided, origins, engines, agent, step, signs, backend, console)
    if terminal is not None:
        terminal.opened(run.path, to_flat(decided), origins)
    stack.callback(reporter.close)
    worker.reporter = reporter
    if transfer is not None:
        reporter.initialised(transfer)
    if saved is not None:
        reporter.resumed(worker, saved, restored)
    reporter.summarize(worker)
    if settings.env.id.startswith("ALE/") and saved is None:
        from ludus.logging.hints import raw_frames

        if raw := raw_frames(settings.env, manager.observation):
            reporter.note(raw)
    plain = saved is None and not settings.roles.agents
    for warning in (linear_networks(agent), flattened_maps(agent)) if plain else ():
        if warning:
            reporter.warn(warning)
    if (room := sum(learner.cache.bytes for learner in worker.learners)) >= 1e5:
        where = given.get("agent.replay_folder") or "memory"
        reporter.note(f"The replay buffer takes up to {room / 1e6:,.1f} MB of {where}.")
    worker.manager.on_warning = evaluator.on_warning = reporter.warn
    for report in early:
        reporter.warn(report)
    if engines.update == "compiled":
        for updater in updaters.values():
            updater.compile(on_failure=reporter.note, during=partial(_compile, worker, reporter))
    stack.callback(worker.close)
    worker.start(decided, stack)
    return worker


def _compile(worker: LocalWorker, reporter: Reporter, build: Callable[[], Any]) -> Any:
    """Compile the update and report it."""
    worker.compiling, began = True, time.monotonic()
    try:
        reporter.note("Compiling the update (about ten seconds the first time) ...")
        return without_signals(build)
    finally:
        worker.compiling = False
        reporter.log_file.note(f"compiling took {time.monotonic() - began:.1f} s")


def check_settings(resolved: Resolved, trust: bool = False, environment: Callable[..., Any] | None = None) -> None:
    """Refuse settings that training would refuse before its first step, for `ludus check` and before a cluster."""
    resolved = _locate(resolved)
    with ExitStack() as stack:
        env, preprocess = resolved.settings.env, resolved.settings.preprocess
        joint = make_manager(env, 1, environment=environment, preprocess=preprocess)
        stack.callback(joint.close)
        manager = divide_environments(joint, resolved.settings)
        resolved = adapt_to_manager(resolved, manager)
        settings = resolved.settings
        agent = build_learners(resolved, manager, settings.device)
        choose_all_engines(settings, agent)
        if settings.container == "impala":
            refuse_unsuitable_agents(settings, agent, manager)
        if not isinstance(agent, Agent):
            return
        if settings.self_play.every:
            make_games(settings, agent, manager, Rows.all(manager.batch))
        give_teacher(agent, settings, manager, trust)
        if settings.init_from:
            initialise_from(agent, decide_sharing(settings, manager.observation, manager.action), trust)
        NetworkCheck(agent, LocalUpdater(agent), settings.network_check)
        rows = Rows.of_rank(0, settings.ranks, settings.env.num).times(settings.env.agents)
        if settings.data.path and Path(settings.data.path).is_dir():  # a run, which plays when training begins
            check_dataset_use(settings, agent)
            return
        give_dataset(settings, agent, manager.observation, manager.action)
        build_cache(agent, manager, rows, make_reward_ops(settings.preprocess.reward))


def _run(worker: LocalWorker, new: bool) -> None:
    reporter = worker.reporter
    assert reporter is not None
    signals = StopOnSignals(worker, partial(reporter.rescue, worker, "The environment does not respond", tells=True))
    with signals.handle(), warn_of_hangs(worker):
        try:
            worker.run(worker.settings.nb_step, worker.local_step_count)
            if worker.evaluated_at < worker.local_step_count and not worker.interrupted:
                worker.evaluate()
            reporter.finish(worker)
            worker.finish()
        except KeyboardInterrupt as error:
            reporter.failed(error)
            if not signals.hung:
                reporter.rescue(worker, "Stopped immediately", tells=True)
                reporter.note(signals.hint())
                raise
            reporter.note(user_traceback(error).rstrip())
            signals.save()
            worker.stopping += "; the environment did not respond"
            worker.close()
        except BaseException as error:
            raised = error
            if isinstance(error, TrainingFailed) and worker.keeps_failures:
                raised = save_failure(reporter.run.path, worker, error)
            reporter.failed(raised)
            reporter.rescue(worker, "The run ended with an error")
            if isinstance(error, UserError) and new and not worker.updates and raised is error:  # leave no empty run
                reporter.close()
                shutil.rmtree(reporter.run.path, ignore_errors=True)
            if raised is error:
                raise
            raise raised from error
