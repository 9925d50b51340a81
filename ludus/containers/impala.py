"""IMPALA (Espeholt et al. 2018): workers act while the host learns from their unrolls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ludus.containers.build import choose_device
from ludus.containers.channel import ActingState, Delivery, HostChannel
from ludus.containers.evaluate import Evaluator
from ludus.containers.hook import OnUpdate
from ludus.containers.impala_worker import WORKER_PHASES, SeatUnrolls, make_seats, match_unrolls
from ludus.containers.local import LocalWorker
from ludus.containers.loop import begin, collect
from ludus.containers.roles import role_settings
from ludus.containers.shared_channel import COPIES, SharedHostChannel
from ludus.containers.team import Team, members
from ludus.core.agent import Agent
from ludus.core.cache import CacheWriter, UnrollWriter
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.rows import Rows
from ludus.core.step import AgentStep, EnvStep, Episode
from ludus.core.types import State, Tensors
from ludus.core.updater import Updater
from ludus.experience.memory import check_fits
from ludus.logging.clock import Clock
from ludus.parallel.resources import cores, free_memory
from ludus.settings.settings import ImpalaConfig, Settings, to_flat
from ludus.settings.trust import LOCAL_CLUSTER

HOST_PHASES = ("waiting", "transfer", "learning", "evaluation", "other")  # transfer: of weights and unrolls
BUSY = 0.2  # share of waiting above which a side is said to wait for the other
FIRST_ADVICE = 50  # updates before the user is told who waits for whom


class ImpalaHost(LocalWorker):
    """Learns from batches of unrolls, publishes the weights after each, and does all else that LocalWorker does.

    ``manager`` has one environment, which shows what observations and actions look like; those that are learned from
    are in the workers.
    """

    def __init__(
        self,
        settings: Settings[Any],
        agent: Agent,
        manager: EnvironmentManager,
        updater: Updater | Mapping[str, Updater],
        evaluator: Evaluator,
        on_update: OnUpdate | None = None,
    ) -> None:
        own = role_settings(settings, manager.roles)
        refuse_unsuitable_agents(settings, agent, manager)
        if not settings.impala.cluster:
            choose_device(settings.impala.device)  # refused here if it does not exist
        self._replaying = {role for role in own if replays(own[role])}  # roles whose unrolls go to a replay of all rows
        self._replays = len(self._replaying) == len(own)
        super().__init__(settings, agent, manager, updater, evaluator, on_update)
        manager, impala = self.manager, settings.impala
        if impala.dynamic and (fixed := [learner for learner in self.learners if not learner.cache.partial]):
            name = fixed[0].settings.agent_name
            raise UserError(f"impala.dynamic is on, but agent {name} replays batches of a fixed size; turn it off.")
        self.clock = Clock(HOST_PHASES)
        self.version = 0  # of the weights that were published last
        # whether workers wait for each update: then they take turns, so that results are reproducible
        self._synchronous, self._turn = not impala.queue and impala.unrolls in (0, impala.workers), 0
        self._held: list[Delivery] = []  # unrolls whose memory is still in use
        self._finished: list[Episode] = []
        self._lags: Counter[int] = Counter()  # unrolls by lag, since the last line of metrics
        self._dropped, self._received, self._copies, self._queued = 0, 0, 0, 0
        self._worker_seconds = dict.fromkeys(WORKER_PHASES, 0.0)
        self._worker_steps, self._learned_steps = 0, 0
        self._reported = ""  # the last bottleneck that the user was told
        self._sent: list[int] = []  # self-play: steps of the members of the pool that workers have
        each = settings.env.num // impala.workers
        environments = [Rows(i * each, (i + 1) * each, settings.env.num) for i in range(impala.workers)]
        given = {"settings": to_flat(settings), "env_seed": self.env_seed, "noise_seed": self.seeds[0]}
        unroll = outline_unroll(settings, agent, manager, each)
        opponents = None if self.pool is None else self.pool.to_workers()
        here = impala.workers if impala.cluster in ("", LOCAL_CLUSTER) else 0  # workers with a pool on this machine
        check_fits(
            f"impala.queue is {impala.queue}, and memory for the unrolls of {impala.workers} workers"
            f"{'' if self.pool is None else f' and {self.pool.size} opponents (self_play.size)'} takes",
            impala.workers * (impala.queue + 1) * sum(x.nbytes for x in unroll.values())
            + (COPIES + here) * sum(x.nbytes for x in (opponents or {}).values()),
            free_memory(),
            f"lower impala.queue, {'' if self.pool is None else 'self_play.size, '}env.num or the length of unrolls",
        )
        self.channel: HostChannel = make_channel(impala, environments, unroll, self._acting_state(), given, opponents)
        self.channel.on_warning = lambda text: manager.on_warning(f"{manager.name}: {text}")

    def _rows_of(self, role: str, settings: Settings[Any]) -> Rows:
        """Return the rows of the largest batch; nothing acts here."""
        return Rows.all(settings.rows if replays(settings) else settings.impala.batch_rows(settings.rows)[1])

    def _acting_state(self) -> Tensors:
        return {name: x for part in self.learners for name, x in part.named(part.agent.acting_state()).items()}

    def _begin(self) -> None:
        self.channel.start([None] * self.settings.impala.workers)
        self.clock = Clock(HOST_PHASES)  # the start of the workers is not part of training

    def _collect(self) -> int:
        """Publish the weights and receive unrolls until there is a batch; return their environment steps."""
        self.version += 1
        progress = self.local_step_count / self.settings.nb_step
        members = [] if self.pool is None else [member.step for member in self.pool.members]
        opponents = self.pool.to_workers() if self.pool is not None and members != self._sent else None
        self._sent = members
        self.channel.publish(ActingState(self.version, progress, self._acting_state(), opponents))
        for delivery in self._held:
            self.channel.release(delivery)
        self._held.clear()
        self._queued = self.channel.queued()
        steps, unrolls = 0, 0
        batches = [part.cache for part in self.learners if self._replays or part.role not in self._replaying]
        while not any([cache.ready() for cache in batches]) and not (self._replays and unrolls):
            self.clock.lap("transfer")
            delivery = self.channel.receive(self._turn if self._synchronous else None)
            self.clock.lap("waiting")
            self._turn = (delivery.worker + 1) % self.settings.impala.workers
            steps += delivery.report.steps
            unrolls += self._take(delivery)
            if self.settings.impala.dynamic and unrolls and not self.channel.queued():
                for learner in self.learners:
                    learner.cache.finish()
        self.clock.lap("transfer")
        return steps

    def _take(self, delivery: Delivery) -> bool:
        """Add an unroll to the batch of every role, unless it is too old for that; return whether it was added."""
        unroll, report = delivery.unroll, delivery.report
        self._finished += report.episodes
        for warning in report.warnings:
            self.manager.on_warning(warning)
        for phase, seconds in report.seconds.items():
            self._worker_seconds[phase] += seconds
        self._worker_steps += report.steps
        self._received += 1
        lag = self.version - unroll.version
        self._lags[lag] += 1
        old = lag > self.settings.impala.max_lag
        if old and not self._replaying:
            self._dropped += 1
            self.channel.release(delivery)
            return False
        self._learned_steps += report.steps
        in_place = False  # whether a batch is this memory
        for learner in self.learners:
            role = learner.role
            if old and role not in self._replaying:
                continue
            rows = unroll.rows.times(self.manager.roles[role].agents)
            learner.cache.receive(unroll._replace(tensors=learner.select(unroll.tensors), rows=rows))
            whole = rows.size == learner.seat.rows.size and role not in self._replaying
            in_place = in_place or (whole and self.device.type == "cpu")
        self._copies += self.channel.copies + (not in_place)
        if in_place or not self.settings.impala.queue:
            self._held.append(delivery)  # until it was learned from, and with queue 0 until the weights are published
        else:
            self.channel.release(delivery)
        return True

    def _episodes(self) -> list[Episode]:
        finished, self._finished = self._finished, []
        return finished

    @property
    def backend(self) -> str:
        """How environments are stepped, for the user."""
        impala = self.settings.impala
        return f"{impala.workers} worker{'s' * (impala.workers > 1)}{' over Ray' * bool(impala.cluster)}"

    def progress(self) -> dict[str, float]:
        """Return the metrics of the loop, and who waits for whom."""
        waits = self.waiting()
        busy = max(sum(self._worker_seconds.values()) - self._worker_seconds["waiting"], 1e-9)
        learning = max(self.clock.nanoseconds["learning"] / 1e9, 1e-9)
        total = max(sum(self._lags.values()), 1)
        slots = self.settings.impala.workers * (self.settings.impala.queue + 1)
        return super().progress() | {
            "impala/version": float(self.version),
            "impala/lag": sum(lag * n for lag, n in self._lags.items()) / total,
            **{f"impala/lag_{lag}": n / total for lag, n in sorted(self._lags.items())},
            "impala/dropped": self._dropped / max(self._received, 1),
            "impala/copies": self._copies / max(self._received - self._dropped, 1),
            "impala/queue": self._queued / slots,
            "impala/restarts": float(self.channel.restarts),
            "impala/learner_waits": waits["learner"],
            "impala/workers_wait": waits["workers"],
            "impala/learner_steps_per_second": self._learned_steps / learning,
            "impala/worker_steps_per_second": self._worker_steps / busy,
        }

    def _log(self, metrics: dict[str, float]) -> None:
        super()._log(metrics)
        self._lags.clear()
        bottleneck = self.bottleneck()
        if bottleneck != self._reported and self.updates >= FIRST_ADVICE and self.reporter is not None:
            self._reported = bottleneck
            if advice := self.advice():
                self.reporter.note(advice)

    def waiting(self) -> dict[str, float]:
        """Return the share of the time that the learner waited for unrolls, and that workers waited for the learner.

        Evaluations and the like do not count.
        """
        spent = self.clock.nanoseconds
        learner = spent["waiting"] / max(spent["waiting"] + spent["transfer"] + spent["learning"], 1)
        workers = self._worker_seconds["waiting"] / max(sum(self._worker_seconds.values()), 1e-9)
        return {"learner": learner, "workers": workers}

    def bottleneck(self) -> str:
        """Return which side the other waits for, ``learner`` or ``workers``; empty if both are busy."""
        waits = self.waiting()
        if max(waits.values()) <= BUSY:
            return ""
        return "workers" if waits["learner"] > waits["workers"] else "learner"

    def advice(self) -> str:
        """Return which side waits for the other, and what to change; empty if both are busy."""
        waits, workers, bottleneck = self.waiting(), self.settings.impala.workers, self.bottleneck()
        if bottleneck == "workers":
            more = "environments per worker (env.num)"
            if self.settings.impala.cluster not in ("", LOCAL_CLUSTER):
                more = f"workers (impala.workers) or {more}"
            elif workers + 1 < cores():
                more = f"workers (impala.workers; this machine has {cores()} cores) or {more}"
            return f"The learner waits for unrolls {waits['learner']:.0%} of the time: add {more}."
        if bottleneck == "learner":
            faster = "fewer updates (agent.updates_per_step)" if self._replays else "larger batches (impala.unrolls)"
            return (
                f"The workers wait for the learner {waits['workers']:.0%} of the time: more of them would not help; "
                f"{faster} or a GPU make the learner faster."
            )
        return ""

    def _collector_state(self, whole: bool) -> State:
        impala: State = {"version": self.version, "restarts": self.channel.restarts, "turn": self._turn}
        impala["incarnations"] = list(self.channel.incarnations)
        return {"workers": self.channel.save() if whole else None, "impala": impala}

    def _load_collector(self, state: State) -> str:
        """Start the workers where they were, or, if that is unknown, with new episodes."""
        saved, number = state["workers"], self.settings.impala.workers
        impala = state["impala"]
        if len(impala["incarnations"]) != number:
            raise UserError(
                f"The checkpoint was made with {len(impala['incarnations'])} workers, and impala.workers is {number}; "
                "set it back."
            )
        for learner in self.learners:
            if (cache := learner.own(state["cache"])) is not None:
                learner.cache.load_state_dict(cache)
        states: list[State | None] = saved or [None] * number
        self.version, self.channel.restarts, self._turn = impala["version"], impala["restarts"], impala["turn"]
        lost = [worker for worker, known in enumerate(states) if not known]
        self.channel.incarnations = [before + (worker in lost) for worker, before in enumerate(impala["incarnations"])]
        restored = self.channel.start(states)
        self.clock = Clock(HOST_PHASES)
        self.began = True
        if not saved:
            return "restarted at an episode boundary: the run was interrupted in the middle of an update"
        reasons = [f"worker {worker}: it had failed" for worker in lost]
        reasons += [f"worker {worker}: {text}" for worker, text in enumerate(restored) if text not in ("", "exactly")]
        if reasons:
            return f"restarted at an episode boundary: {'; '.join(reasons)}"
        if self._synchronous:
            return "exactly"
        return "were restored where they were; unrolls that workers had finished ahead of the learner were discarded"

    def close(self) -> None:
        """End the workers, and close all else."""
        try:
            self.channel.close()
        finally:
            super().close()


def make_channel(
    impala: ImpalaConfig,
    environments: list[Rows],
    unroll: Tensors,
    acting_state: Tensors,
    given: dict[str, Any],
    opponents: Tensors | None = None,
) -> HostChannel:
    """Make the channel to workers on this machine or in a cluster; the tensors show what is sent over it."""
    if not impala.cluster:
        sent = (environments, impala.queue + 1, unroll, acting_state, given)
        return SharedHostChannel(*sent, impala.timeout, impala.max_restarts, opponents=opponents)
    from ludus.containers.ray import RayHostChannel  # this process is an actor of the cluster

    return RayHostChannel(environments, given, impala)


def replays(settings: Settings[Any]) -> bool:
    """Return whether an agent with these settings learns from a replay buffer instead of rollouts."""
    return not settings.agent.plan(settings.rows).rollout


@contextmanager
def needs_ray() -> Iterator[None]:
    """Turn the missing module in an import of what uses Ray into a UserError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("Clusters need Ray, which is not installed: run `pip install 'ludus[cluster]'`.") from error


def refuse_unsuitable_agents(settings: Settings[Any], agent: Agent | Team, manager: EnvironmentManager) -> None:
    """Refuse agents that cannot learn from unrolls of older policies, and roles with unrolls of different lengths."""
    own, agents = role_settings(settings, manager.roles), members(agent)
    for role, member in agents.items():
        refuse_unsuitable(own[role], member, f" of role {role}" if settings.roles.agents else "")
    if len(agents) > 1:
        match_unrolls(agents)


def refuse_unsuitable(settings: Settings[Any], agent: Agent, role: str) -> None:
    """Refuse an agent that cannot learn from unrolls of older policies; ``role`` is put after its name."""
    name = f"{settings.agent_name}{role}"
    if not agent.corrects_old_unrolls:
        raise UserError(
            f"container is impala, but agent {name} cannot learn from unrolls of older policies; use "
            "vtrace, appo, acer, or one with a replay buffer, such as dqn or sac."
        )
    impala = settings.impala
    if (replays(settings) or agent.learns_from_single_unrolls) and (impala.unrolls or impala.dynamic):
        given = f"impala.unrolls is {impala.unrolls}" if impala.unrolls else "impala.dynamic is on"
        source = "its replay" if replays(settings) else "one unroll at a time"
        raise UserError(f"{given}, but agent {name} learns from {source}, not from batches of unrolls; leave it out.")


class OneStep(CacheWriter):
    """Writes to an unroll, and stops after one step."""

    def __init__(self, unroll: UnrollWriter) -> None:
        self._unroll = unroll

    def env_write(
        self, step: EnvStep, state: HiddenState, start: int = 0, final_value: torch.Tensor | None = None
    ) -> None:
        self._unroll.env_write(step, state, start, final_value)

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        self._unroll.agent_write(step, start)

    def accepts(self, start: int) -> bool:
        return False

    def amend(self, step: EnvStep) -> None:
        self._unroll.amend(step)


class _Probe:
    """What ``collect`` needs."""

    def __init__(self, manager: EnvironmentManager, parts: list[SeatUnrolls]) -> None:
        self.manager, self.seats, self.clock = manager, [part.seat for part in parts], Clock()
        for part in parts:
            part.seat.cache = OneStep(part.unroll)


def outline_unroll(settings: Settings[Any], agent: Agent, manager: EnvironmentManager, environments: int) -> Tensors:
    """Return meta tensors like those of an unroll, known after one step of one environment."""
    parts = make_seats(settings, agent, manager, Rows.all(manager.batch), seed=0)
    probe = _Probe(manager, parts)
    begin(probe, settings.seed)
    collect(probe)
    tensors: Tensors = {}
    for part in parts:
        tensors |= part.named(part.unroll.outline(environments * manager.roles[part.role].agents))
    return tensors
