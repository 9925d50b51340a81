"""Synchronous data-parallel training: every rank steps a part of the environments, and all learn as one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

import ludus
from ludus.containers.build import build_evaluator, build_manager, make_actor
from ludus.containers.evaluate import Evaluation, Evaluator
from ludus.containers.hook import OnUpdate
from ludus.containers.local import LocalWorker
from ludus.containers.rank_processes import RANK_LOST, SUM, RankProcesses, open_store
from ludus.containers.ranks import RankGroup, RankLost, make_shared_sum, sum_over_ranks, torchrun
from ludus.containers.roles import adapt_to_manager, build_agents, choose_all_engines
from ludus.containers.team import Team, members
from ludus.containers.threads import use_threads
from ludus.containers.updater import LocalUpdater
from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.encoding import from_bytes, to_bytes
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.step import Episode
from ludus.core.types import State, SumOverRanks, Tensors
from ludus.core.updater import LossFunction
from ludus.networks.norm import batch_norm_statistics
from ludus.parallel.orphans import StartedProcesses
from ludus.parallel.resources import cores
from ludus.parallel.shared_sum import SharedSum
from ludus.settings.settings import Resolved, Settings, from_flat, to_flat

# what each rank has its own of in a checkpoint
OWN = ("noise", "torch", "cuda", "generators", "manager", "cache", "groups", "hidden_state")
# settings that may differ between ranks: chosen for each machine, or used by rank 0 alone
MAY_DIFFER = ("device", "threads", "compile", "network.shared", "runs", "name", "tags", "quiet", "init_from")


class DistribUpdater(LocalUpdater):
    """Sums the flat gradient over ranks, with the metrics at its end, in one operation per step.

    The running statistics of batch norms are averaged after each forward pass in training mode.
    """

    def __init__(self, agent: Agent, rank_group: RankGroup) -> None:
        super().__init__(agent)
        self.rank_group, self.ranks = rank_group, rank_group.size
        self._batch_norms = batch_norm_statistics(agent)

    def step(self, loss: LossFunction, batch: Batch, group: str) -> Tensors:
        metrics = super().step(loss, batch, group)
        self._average_batch_norms()
        return metrics

    def gradient(self, loss: LossFunction, batch: Batch, group: str) -> tuple[Tensor, Tensors]:
        gradient, metrics = super().gradient(loss, batch, group)
        self._average_batch_norms()
        return gradient, metrics

    @torch.no_grad()
    def _average_batch_norms(self) -> None:
        """Average their running statistics over ranks, so that all act by the same."""
        if not self._batch_norms:
            return
        flat = torch.cat([x.to(self.flat.value) for x in self._batch_norms])  # pieces may be on other devices
        means = torch.split(self.mean(flat), [len(x) for x in self._batch_norms])
        for x, mean in zip(self._batch_norms, means, strict=True):
            x.copy_(mean)

    @property
    def sum(self) -> SumOverRanks:
        return self.rank_group.sum

    def agree(self, flag: bool) -> bool:
        return int(self.sum(torch.tensor(int(flag)))) == self.ranks

    @torch.no_grad()
    def reduce(self, gradient: Tensor, metrics: Tensors, traced: bool = False) -> Tensors:
        scalars = [name for name, x in metrics.items() if not x.dim()]
        term = torch.cat([gradient, torch.stack([metrics[name] for name in scalars]).to(gradient)])
        total = sum_over_ranks(term) if traced else self.sum(term)
        gradient.copy_(total[: len(gradient)])
        return metrics | dict(zip(scalars, total[len(gradient) :].unbind(), strict=True))


class DistribWorker(LocalWorker):
    """One rank: a LocalWorker with some of the rows, whose steps and gradients are summed with those of other ranks.

    Rank 0 evaluates, logs and saves for all. All ranks have the same parameters at any time, and make the same
    decisions in the same order.
    """

    can_rescue = False  # other ranks may be in the middle of an update, or gone

    def __init__(
        self,
        settings: Settings[Any],
        agent: Agent,
        manager: EnvironmentManager,
        updater: DistribUpdater | Mapping[str, DistribUpdater],
        evaluator: Evaluator,
        on_update: OnUpdate | None = None,
    ) -> None:
        first = updater if isinstance(updater, DistribUpdater) else next(iter(updater.values()))
        self.rank_group, self.rank = first.rank_group, first.rank_group.rank
        environments = self.rank_group.rows(settings.env.num)
        super().__init__(settings, agent, manager, updater, evaluator, on_update, environments)
        if len(self.learners) > 1:  # else a rollout may be full on one rank while a replay interrupts another
            self._agree = first.agree
        self.warnings: list[str] = []  # for rank 0 to report
        self.result: State = {}  # of the run, on other ranks than 0
        self._ended: list[Episode] = []  # of all ranks, on rank 0
        self._others: list[State] = []  # states of the other ranks in the checkpoint, until they are sent
        self._processes: RankProcesses | None = None
        self._new_return: float | None = None  # of an evaluation, on rank 0 until the others know it

    @classmethod
    def make_updaters(cls, agent: Agent | Team, settings: Settings[Any]) -> Mapping[str, DistribUpdater]:
        group = RankGroup(0, settings.ranks, settings.distrib.timeout)
        return {role: DistribUpdater(member, group) for role, member in members(agent).items()}

    def start(self, settings: Settings[Any], stack: ExitStack) -> None:
        """Start the other ranks with these settings, unless torchrun did, and connect to them."""
        if warning := more_ranks_than_cores(settings):
            self.manager.on_warning(warning)
        stack.callback(self.rank_group.close)
        store: Store | None = None
        shared: SharedSum | None = None
        if torchrun() is None and self.rank_group.size > 1:
            self._processes = RankProcesses(settings)
            stack.callback(self._processes.end)  # before the group closes, which waits for a sum that was begun
            self.rank_group.watch(self._processes.check)
            store, shared = self._processes.store, self._processes.shared
        self.rank_group.connect(self.device, store, shared)
        self._send_states()
        if self._processes is not None and self.device.type == "cpu":  # NCCL goes on using it
            self._processes.delete_store()

    def follow(self) -> None:
        """Train as another rank than 0, from the first state to the last checkpoint."""
        self._receive_state()
        self.run(self.settings.nb_step, self.local_step_count)
        self.state_dict()
        self.finish()

    def finish(self) -> None:
        """Tell other ranks the result, and wait until their processes have ended."""
        if self.rank:
            self.result = from_bytes(self.rank_group.exchange({})[0])
            return
        last, path = self.last_evaluation, "" if self.reporter is None else str(self.reporter.run.path)
        result: State = {"run": path, "steps": self.local_step_count, "best": self.best, "reason": self.stopping}
        result["evaluation"] = None if last is None else [last.returns, last.lengths, dict(last.infos)]
        self.rank_group.exchange(dict.fromkeys(range(1, self.rank_group.size), to_bytes(result)))
        if self._processes is not None:
            self._processes.join()

    def _collect(self) -> int:
        """Collect; return the steps of all ranks, and bring their episodes and warnings to rank 0."""
        steps = super()._collect()
        start = self.environments.start
        episodes = [episode._replace(row=episode.row + start) for episode in self.manager.episodes()]
        news = b""
        if self.rank and (episodes or self.warnings):
            news = json.dumps([episodes, self.warnings], default=float).encode()
        counts = torch.zeros(1 + self.rank_group.size, dtype=torch.int64)
        counts[0], counts[1 + self.rank] = steps, len(news)
        total, *sizes = self.rank_group.sum(counts).tolist()
        received = self.rank_group.gather(news, sizes) if any(sizes) else []
        self.warnings.clear()
        if self.rank == 0:
            self._ended = episodes
            for source, data in enumerate(received):
                others, warnings = json.loads(data or b"[[], []]")
                self._ended += [Episode(*episode) for episode in others]
                for warning in warnings:
                    self.manager.on_warning(f"Rank {source}: {warning}")
        return int(total)

    def _episodes(self) -> list[Episode]:
        ended, self._ended = self._ended, []
        return ended

    def _stops(self) -> bool:
        """Return whether any rank asks to stop, the same on all; tell them the return of the last evaluation."""
        new, self._new_return = self._new_return, None
        mine = torch.tensor([bool(self.stopping), new is not None, new or 0.0], dtype=torch.float64)
        asked, known, mean = self.rank_group.sum(mine).tolist()
        if known and self.rank:
            super()._use_return(mean)
        if asked and not self.stopping:
            self.stopping = "SIGTERM was received by another rank"
        return bool(asked)

    def _use_return(self, mean: float) -> None:
        super()._use_return(mean)
        self._new_return = mean

    def evaluate(self) -> Evaluation | None:
        """Evaluate on rank 0; the others wait for it at their next sum."""
        return super().evaluate() if self.rank == 0 else None

    def _interrupts_evaluation(self) -> bool:
        self.rank_group.check()
        return super()._interrupts_evaluation()

    def _save(self) -> None:
        if self.rank:
            self.state_dict()
        else:
            super()._save()

    def state_dict(self) -> State:
        """Return all that a resume needs, on rank 0 with what every other rank has of its own; call it on all ranks."""
        state = super().state_dict()
        mine = {name: state[name] for name in (*OWN, "agent")}
        received = self.rank_group.exchange({0: to_bytes(mine)} if self.rank else {})
        others = [from_bytes(received[rank]) for rank in range(1, self.rank_group.size)] if self.rank == 0 else []
        learned = {name for name, p in self.agent.named_parameters() if p.requires_grad}
        for rank, other in enumerate(others, 1):
            differs = {name: x for name, x in other["agent"].items() if not _equal(x, state["agent"][name])}
            if changed := sorted(learned & differs.keys()):
                raise UserError(
                    f"The parameter {changed[0]} of rank {rank} differs from that of rank 0: on_update, which rank 0 "
                    "alone calls, or a loss that depends on the rank must not change parameters."
                )
            other["agent"] = differs
        return state | {"ranks": others}

    def _load(self, state: State) -> str:
        if self.rank == 0:
            if len(state["ranks"]) != self.rank_group.size - 1:
                raise UserError(
                    f"The checkpoint has {len(state['ranks']) + 1} ranks, but there are {self.rank_group.size}; resume "
                    "with as many."
                )
            common = {name: x for name, x in state.items() if name not in ("ranks", "metrics")}
            self._others = [common | own | {"agent": state["agent"] | own["agent"]} for own in state["ranks"]]
        return super()._load(state)

    def _send_states(self) -> None:
        """Send every other rank its part of the checkpoint, or the initial parameters."""
        others, self._others = self._others, []
        initial: State = {"agent": dict(self.agent.state_dict())}
        about = {"versions": _versions(), "settings": json.dumps(_common_settings(self.settings))}
        ranks = range(1, self.rank_group.size)
        if self.pool is not None:  # rank 0 alone has the folder of its members
            others = [other | {"pool": self.pool.state_dict(with_tensors=True)} for other in others]
        states = others or [initial for _ in ranks]
        parts = {rank: to_bytes({**about, "state": state}) for rank, state in zip(ranks, states, strict=True)}
        self.rank_group.exchange(parts)

    def _receive_state(self) -> None:
        received = from_bytes(self.rank_group.exchange({})[0])
        _refuse_other_command(self.rank, received, self.settings)
        state = received["state"]
        if "counters" not in state:
            self.agent.load_state_dict(state["agent"])
        elif (restored := self.load_state_dict(state)) != "exactly":
            self.warnings.append(f"environments {restored}.")


def _equal(x: Any, y: Any) -> bool:
    return torch.equal(x, y.cpu()) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)


def _versions() -> State:
    return {"Ludus": ludus.__version__, "torch": torch.__version__}


def _common_settings(settings: Settings[Any]) -> State:
    return {key: value for key, value in to_flat(settings).items() if key not in MAY_DIFFER}


def _refuse_other_command(rank: int, received: State, settings: Settings[Any]) -> None:
    """Refuse ranks with other versions or settings than rank 0."""
    for name, version in _versions().items():
        if version != (other := received["versions"][name]):
            raise UserError(f"Rank {rank} has {name} {version}, but rank 0 has {other}; install the same on both.")
    ours, theirs = json.loads(json.dumps(_common_settings(settings))), json.loads(received["settings"])
    for key in ours.keys() | theirs.keys():
        if ours.get(key) != theirs.get(key):
            raise UserError(
                f"{key} is {ours.get(key)} on rank {rank}, but {theirs.get(key)} on rank 0; start all with the same "
                "command."
            )


def decide_ranks(resolved: Resolved) -> Resolved:
    """Decide how many ranks there are, and refuse settings that do not fit them."""
    settings, place = resolved.settings, torchrun()
    asked = settings.distrib.ranks
    if place is not None and asked not in (0, place.ranks):
        raise UserError(f"distrib.ranks is {asked}, but torchrun started {place.ranks} processes; leave it out.")
    gpus = 0 if settings.device == "cpu" else torch.cuda.device_count()
    ranks = place.ranks if place is not None else asked or gpus or cores()
    if ranks == asked:
        return resolved
    settings = replace(settings, distrib=replace(settings.distrib, ranks=ranks))
    settings.validate()
    return Resolved(settings, resolved.origins | {"distrib.ranks": "chosen"})


def rank_device(settings: Settings[Any], rank: int = 0) -> str:
    """Return the device of a rank: a GPU of its own where there is one for each rank of this machine, or the CPU."""
    place, name = torchrun(), settings.device
    here, ranks = (rank, settings.ranks) if place is None else (place.local_rank, place.local_ranks)
    gpus = torch.cuda.device_count()
    if ranks == 1 or name == "cpu":
        return name
    if name not in ("auto", "cuda"):
        raise UserError(f"device is {name}, but each of {ranks} ranks needs its own; set it to cuda or cpu.")
    if name == "cuda" and gpus < ranks:
        raise UserError(f"device is cuda, but this machine has {gpus} GPUs for {ranks} ranks; lower distrib.ranks.")
    return f"cuda:{here}" if gpus >= ranks else "cpu"


def more_ranks_than_cores(settings: Settings[Any]) -> str:
    """Return a warning if the ranks of this machine have to share cores, else an empty string."""
    place = torchrun()
    here = settings.ranks if place is None else place.local_ranks
    if here <= cores():
        return ""
    return (
        f"There are {here} ranks on {cores()} core{'s' * (cores() > 1)} of this machine, so they wait for each other; "
        f"{cores()} would be faster."
    )


def build_rank(
    resolved: Resolved, group: RankGroup, stack: ExitStack, environment: Callable[..., Any] | None, new: bool
) -> DistribWorker:
    """Build the worker of another rank than 0; ``new``: adapt the defaults to the observations."""
    settings = resolved.settings
    torch.manual_seed(settings.seed + group.rank)  # for networks with random layers, such as dropout
    started = StartedProcesses()
    stack.callback(started.end)
    with started:
        manager = build_manager(settings, environment, group.rank)
    stack.callback(manager.close)
    if new:
        settings = adapt_to_manager(resolved, manager).settings
    agent: Any = build_agents(settings, manager, rank_device(settings, group.rank))
    manager.set_action_transform(agent.action_transform)
    updaters = {role: DistribUpdater(member, group) for role, member in members(agent).items()}
    engines = choose_all_engines(settings, agent)
    stack.enter_context(use_threads(engines.threads))
    evaluator = build_evaluator(settings, make_actor(agent, manager), environment)
    worker = DistribWorker(settings, agent, manager, updaters, evaluator)
    worker.started = started
    worker.manager.on_warning = worker.warnings.append
    if engines.update == "compiled":
        for updater in updaters.values():
            updater.compile(on_failure=worker.warnings.append)
    return worker


def run_rank(given: dict[str, Any], fds: dict[str, int]) -> None:
    """Run a rank in the process that rank 0 started for it."""
    settings = from_flat(given["settings"])
    group = RankGroup(given["rank"], settings.ranks, settings.distrib.timeout)
    shared = make_shared_sum(group.rank, group.size, fds[SUM]) if SUM in fds else None
    try:
        with ExitStack() as stack:
            worker = build_rank(Resolved(settings, {}), group, stack, environment=None, new=False)
            group.connect(worker.device, open_store(given["folder"], settings.ranks), shared)
            worker.follow()
    except RankLost:
        sys.exit(RANK_LOST)
