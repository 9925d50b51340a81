"""Workers and a learner in processes of their own, and the parts of the channel between them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from containers_setup import dotted, make_worker, saved, small, train

import ludus
from benchmarks.soak_watch import MARK, alive, left_behind, named_memory, parent, start
from ludus.containers.build import build_evaluator, build_manager, divide_environments, make_actor
from ludus.containers.channel import ActingState
from ludus.containers.impala import ImpalaHost
from ludus.containers.impala_worker import ImpalaWorker, stream_seed
from ludus.containers.local import LocalWorker
from ludus.containers.roles import adapt_to_manager, build_agents
from ludus.containers.shared_channel import PublishedState, SharedHostChannel, SharedWorkerChannel, layout_of
from ludus.containers.team import members
from ludus.containers.updater import LocalUpdater
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.core.types import State
from ludus.logging.metrics import read_metrics
from ludus.managers.make import make_manager
from ludus.runs.report import describe_workers
from ludus.settings.settings import resolve_settings

VTRACE: dict[str, Any] = {"container": "impala", "agent__rollout": 8, "env__num": 4}
LOCKSTEP: dict[str, Any] = {"impala__workers": 1, "impala__queue": 0}
TOY = "ludus.environments.agents_toy:"
TEAM, NIM = TOY + "CueTeam", TOY + "Nim"
GUIDED = ("agents=2", "guides=1", "length=3")
ROLLOUTS = {"roles__agent__agent__rollout": 8, "roles__guide__agent__rollout": 8}


class Here(SharedHostChannel):
    """A channel to workers in this process, which take turns with the host."""

    def start(self, states: Any) -> list[str]:
        self.made = [self._make(worker) for worker in self._workers]
        for worker, state in zip(self.made, states, strict=True):
            if state is not None:
                worker.load_state_dict(state)
        return [""] * len(self.made)

    def _make(self, known: Any) -> ImpalaWorker:
        names = {"memory": known.memory.block.fd, "published": self._published.block.fd}
        fds = {name: os.dup(fd) for name, fd in names.items()} | {"go": known.go, "done": self._done}
        fds |= {"letter": known.letter} | {f"report {i}": fd for i, fd in enumerate(known.reports)}
        fds["opponents"] = os.dup(self._opponents.block.fd)
        given = {"slots": self._slots, "layout": self._layout, "state_layout": self._state_layout}
        given["opponents_layout"] = self._opponents_layout
        settings = ludus.settings.settings.from_flat(self._settings["settings"])
        manager = divide_environments(make_manager(settings.env, known.rows), settings)
        agent: Any = build_agents(settings, manager, torch.device("cpu"))
        seeds = [stream_seed(self._settings[name], known.number, 0) for name in ("env_seed", "noise_seed")]
        return ImpalaWorker(settings, agent, manager, SharedWorkerChannel(given, fds), known.rows, *seeds)

    def receive(self, worker: int | None = None) -> Any:
        """Let a worker fill an unroll if there is none: the one asked for, or each in turn."""
        if worker is not None or not self.queued():
            turn = self.__dict__.setdefault("turn", 0) if worker is None else worker
            self.turn = (turn + 1) % len(self.made)
            self.made[turn].run(1)
        return super().receive(worker)


@contextmanager
def host_here(
    monkeypatch: pytest.MonkeyPatch, agent: str = "vtrace", environment: str = "CartPole-v1", **changes: Any
) -> Iterator[ImpalaHost]:
    monkeypatch.setattr("ludus.containers.impala.SharedHostChannel", Here)
    host: Any = make(environment, agent, **VTRACE | changes)
    try:
        yield host
    finally:
        host.close()


def make(environment: str, agent: str, **changes: Any) -> LocalWorker:
    torch.set_num_threads(1)
    given = small(agent) | {"nb_step": 10_000} | dotted(changes)
    resolved = resolve_settings(environment, agent, "none", None, given)
    manager = build_manager(resolved.settings)
    settings = (adapt_to_manager(resolved, manager) if resolved.settings.roles.agents else resolved).settings
    made: Any = build_agents(settings, manager, torch.device("cpu"))
    manager.set_action_transform(made.action_transform)
    kind = ImpalaHost if settings.container == "impala" else LocalWorker
    evaluator = build_evaluator(settings, make_actor(made, manager))
    return kind(
        settings, made, manager, {role: LocalUpdater(member) for role, member in members(made).items()}, evaluator
    )


SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "roles": (TEAM, {"env__options": GUIDED, "roles__agents": "agent=vtrace, guide=appo"} | ROLLOUTS),
    "recurrent roles": (TEAM, {"env__options": GUIDED, "roles__agents": "each", "network__body": "lstm"}),
    "self-play": (NIM, {"self_play__every": 60, "self_play__size": 2}),
    "recurrent self-play": (NIM, {"self_play__every": 60, "network__body": "lstm"}),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_one_worker_with_several_agents_in_lockstep_is_the_local_worker(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, changes = SEVERAL[name]
    local = make(environment, "vtrace", agent__rollout=8, env__num=4, **changes)
    local.run(256)
    with host_here(monkeypatch, "vtrace", environment, **LOCKSTEP, **changes) as host:
        host.run(256)
        assert host.updates == local.updates > 0
        assert host.episodes.state_dict() == local.episodes.state_dict()
        assert_equal(host.agent.state_dict(), local.agent.state_dict())
        if host.pool is not None and local.pool is not None:
            assert host.pool.metrics() == local.pool.metrics()
            assert [member.step for member in host.channel.made[0].pool.members] == host._sent
    local.close()


def test_roles_with_rollouts_and_with_a_replay_learn_from_the_same_unrolls(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"env__options": GUIDED, "roles__agents": "agent=vtrace, guide=dqn", "roles__guide__agent__warmup": 40}
    changes |= {"roles__guide__agent__batch_size": 8, "impala__workers": 2, "impala__max_lag": 0, "impala__queue": 2}
    with host_here(monkeypatch, "vtrace", TEAM, **changes, log_every=0) as host:
        host.run(400)
        second = host.channel.made[1]
        for _ in range(2):
            second.run(1)  # too old for the rollouts when they are received, but not for the replay
        host.run(500, host.local_step_count)
        numbers = host.progress()
        assert numbers["impala/lag"] > 0
        assert numbers["impala/dropped"] == 0
        assert numbers["impala/copies"] == 1
        assert numbers["guide/replay/size"] > 100
        agent, guide = host.learners
        assert agent.metrics.keys() >= {"agent/loss/policy"}
        assert guide.metrics.keys() >= {"guide/loss/value"}
        assert float(numbers["guide/replay/updates_per_step"]) == pytest.approx(0.25, abs=0.05)


def assert_equal(one: State, other: State) -> None:
    assert list(one) == list(other)
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


@pytest.mark.parametrize(
    ("body", "agent"), [("mlp", "vtrace"), ("lstm", "vtrace"), ("lstm", "acer_vtrace"), ("mlp", "appo")]
)
def test_one_worker_in_lockstep_is_the_local_worker(body: str, agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"network__body": body} | ({"agent__warmup": 32} if agent == "acer_vtrace" else {})
    local = make_worker("CartPole-v1", agent, agent__rollout=8, nb_step=10_000, **changes)
    local.run(256)
    with host_here(monkeypatch, agent, **LOCKSTEP, **changes) as host:
        host.run(256)
        assert (host.local_step_count, host.updates) == (local.local_step_count, local.updates)
        assert host.episodes.state_dict() == local.episodes.state_dict()
        assert_equal(host.agent.state_dict(), local.agent.state_dict())
        assert host.progress()["impala/lag"] == 0
    local.close()


def test_environment_processes_with_actions_of_one_batch_are_those_of_a_local_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: dict[str, Any] = {"env__backend": "subproc", "env__workers": 2, "env__alternate": True}
    local = make_worker("CartPole-v1", "vtrace", agent__rollout=8, nb_step=10_000, **changes)
    local.run(256)
    with host_here(monkeypatch, "vtrace", **LOCKSTEP, **changes) as host:
        host.run(256)
        assert_equal(host.agent.state_dict(), local.agent.state_dict())
        for worker in host.channel.made:
            worker.close()
    local.close()


def test_processes_in_lockstep_stopped_and_resumed_are_the_local_worker(tmp_path: Path) -> None:
    given: dict[str, Any] = {"agent__rollout": 8, "nb_step": 320, "evaluation__every": 160, "log_every": 32}
    local = train(tmp_path / "local", "CartPole-v1", "vtrace", **given)
    lockstep = given | VTRACE | LOCKSTEP
    stopped = train(tmp_path, "CartPole-v1", "vtrace", lambda values: values["step"] < 170, **lockstep)
    assert stopped.steps < 300
    resumed = ludus.resume(stopped.run)
    assert "Environments were restored exactly" in (resumed.run / "log.txt").read_text()
    assert resumed.evaluation == local.evaluation
    assert_equal(saved(resumed.run)["agent"], saved(local.run)["agent"])
    lines, expected = (
        [{k: x for k, x in line.items() if not k.startswith(("time", "impala/"))} for line in read_metrics(path)]
        for path in (resumed.run / "metrics.jsonl", local.run / "metrics.jsonl")
    )
    assert lines == expected


def test_old_unrolls_are_dropped_and_lags_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"impala__workers": 2, "impala__queue": 2, "impala__max_lag": 1, "impala__unrolls": 1, "log_every": 0}
    with host_here(monkeypatch, **changes) as host:
        host.run(1)
        second = host.channel.made[1]
        for _ in range(3):
            second.run(1)  # three unrolls of version 1
        for _ in range(2):
            host.run(host.local_step_count + 1, host.local_step_count)
        numbers = host.progress()
        assert {k: x for k, x in numbers.items() if k.startswith("impala/lag_")} == {
            "impala/lag_0": 0.4,
            "impala/lag_1": 0.2,
            "impala/lag_2": 0.4,
        }
        assert (numbers["impala/version"], numbers["impala/dropped"], host.updates) == (3, 0.4, 3)
        assert host.local_step_count == host._worker_steps > host._learned_steps


@pytest.mark.parametrize(("agent", "workers", "copies"), [("vtrace", 1, 0), ("vtrace", 2, 1), ("acer_vtrace", 1, 0)])
def test_copies_of_unrolls_are_counted(agent: str, workers: int, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with host_here(monkeypatch, agent, impala__workers=workers, impala__queue=1) as host:
        host.run(200)
        numbers, known = host.progress(), host.channel._workers
        assert numbers["impala/copies"] == copies
        slots = [unroll["reward"].data_ptr() for worker in known for unroll in worker.memory.unrolls]
        assert (host.cache.blocks["reward"].data_ptr() in slots) == (copies == 0)


def test_metrics_describe_the_workers_for_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_here(monkeypatch, impala__workers=2, impala__queue=1) as host:
        host.run(500)
        facts = describe_workers(host.progress())
        assert [fact.split()[0] for fact in facts] == ["waiting", "queue", "lag", "0"]
        spent = host.clock.nanoseconds
        assert min(spent["waiting"], spent["transfer"], spent["learning"]) > 0
    assert describe_workers({"loss/policy": 1.0}) == []


def test_a_batch_of_one_unroll_is_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_here(monkeypatch, impala__workers=2, impala__unrolls=1) as host:
        host.run(1)
        slots = [x.data_ptr() for worker in host.channel._workers for x in (u["reward"] for u in worker.memory.unrolls)]
        assert host.cache.blocks["reward"].data_ptr() in slots
        assert len(host._held) == 1
        assert host.progress()["impala/copies"] == 0
    with host_here(monkeypatch, impala__workers=2, impala__unrolls=2) as host:
        host.run(1)
        assert host._held == []
        assert host.progress()["impala/copies"] == 1


def test_a_dynamic_batch_has_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    with host_here(monkeypatch, impala__workers=2, impala__unrolls=4, impala__dynamic=True) as host:
        learn = host.guard.learn
        monkeypatch.setattr(host.guard, "learn", lambda batch: sizes.append(batch.reward.shape[1]) or learn(batch))
        host.run(1)
        for _ in range(2):
            for worker in host.channel.made:
                worker.run(1)
        host.run(host.local_step_count + 1, host.local_step_count)
        host.run(host.local_step_count + 1, host.local_step_count)
    assert sizes == [2, 8, 2]


def test_workers_wait_when_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_here(monkeypatch, impala__workers=2, impala__queue=1) as host:
        host.run(1)
        worker, known = host.channel.made[0], host.channel._workers[0]
        while known.memory.worker[0] - known.memory.host[0] < 2:
            worker.run(1)
        monkeypatch.setattr(os, "eventfd_read", lambda fd: pytest.fail("waits") if fd == known.go else 0)
        with pytest.raises(pytest.fail.Exception, match="waits"):
            worker.run(1)
        assert host.channel.queued() == 2


def test_a_reader_never_sees_a_mixed_version() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros((), dtype=torch.float64)}
    host = PublishedState(layout_of(tensors))
    reader = PublishedState(layout_of(tensors), os.dup(host.block.fd))
    for version in range(1, 6):
        host.write(ActingState(version, version / 10, {name: x + version for name, x in tensors.items()}))
        state = reader.read(version - 1)
        assert state is not None
        assert (state.version, state.progress) == (version, version / 10)
        assert {float(x.max()) for x in state.tensors.values()} == {float(version)}
    assert reader.read(5) is None
    host._versions[5 % 2, 0] = 0  # being written: the reader tries again, until it is done
    clone, seen = torch.Tensor.clone, []

    def cloning(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        if len(seen) == 4:
            host._versions[5 % 2, 0] = 5
        return clone(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", cloning)
        state = reader.read(4)
    assert state is not None
    assert len(seen) == 4
    for part in (host, reader):
        part.close()


def test_seeds_of_workers_differ_and_the_first_is_that_of_a_local_run() -> None:
    assert stream_seed(7, 0, 0) == 7
    assert len({stream_seed(7, worker, number) for worker in range(4) for number in range(4)}) == 16


@pytest.mark.parametrize(
    ("agent", "changes", "words"),
    [
        ("a2c", {}, "agent a2c cannot learn from unrolls of older policies; use vtrace"),
        ("ppo", {}, "agent ppo cannot learn from unrolls of older policies"),
        ("dqn", {"impala__unrolls": 1}, "impala.unrolls is 1, but agent dqn learns from its replay"),
        ("a3c", {"impala__unrolls": 2}, "impala.unrolls is 2, but agent a3c learns from one unroll at a time"),
        ("a3c", {"impala__dynamic": True}, "impala.dynamic is on, but agent a3c learns from one unroll at a time"),
        ("acer", {"impala__dynamic": True}, "impala.dynamic is on, but agent acer"),
        ("vtrace", {"env__num": 5}, "env.num is 5, which 2 workers cannot share equally"),
        ("vtrace", {"impala__queue": 0, "impala__unrolls": 3}, "impala.queue is 0"),
        ("vtrace", {"impala__device": "mars"}, 'device is "mars", which this machine does not have'),
        ("vtrace", {"env__repeat_seeds": 2}, "env.repeat_seeds is 2, but in the container impala"),
        ("vtrace", {"impala__workers": 0}, "impala.workers is 0, but must be at least 1"),
        ("vtrace", {"roles__agents": "agent=vtrace, guide=ppo"}, "agent ppo of role guide cannot learn from unrolls"),
        (
            "vtrace",
            {"roles__agents": "agent=vtrace, guide=appo", "roles__guide__agent__rollout": 5},
            "role agent has unrolls of 8 steps, and role guide of 5; give them the same length",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    agent: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    environment = {"env__options": GUIDED} if "roles__agents" in changes else {}
    given = {"container": "impala", "env__num": 4, "nb_step": 5000} | environment | changes
    with pytest.raises(UserError, match=words):
        train(tmp_path, TEAM if environment else "CartPole-v1", agent, **given)
    assert not list(tmp_path.iterdir())


def test_memory_for_opponents_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = LOCKSTEP | {"self_play__every": 60, "self_play__size": 2}
    with host_here(monkeypatch, "vtrace", NIM, **changes) as host:
        assert host.pool is not None
        (unroll,) = host.channel._workers[0].memory.unrolls
        pool = sum(x.nbytes for x in host.pool.to_workers().values())
        needed = sum(x.nbytes for x in unroll.values()) + 3 * pool  # two are sent in turn, and the worker has one
    monkeypatch.setattr("ludus.containers.impala.free_memory", lambda: needed)
    with host_here(monkeypatch, "vtrace", NIM, **changes):
        pass
    monkeypatch.setattr("ludus.containers.impala.free_memory", lambda: needed - 1)
    words = r"1 workers and 2 opponents \(self_play.size\) takes .* lower impala.queue, self_play.size, env.num"
    with pytest.raises(UserError, match=words), host_here(monkeypatch, "vtrace", NIM, **changes):
        pass


def test_an_environment_that_only_this_process_has_is_refused(tmp_path: Path) -> None:
    import gymnasium

    with pytest.raises(UserError, match=r"container is impala, but .*<lambda> cannot be imported by another process"):
        train(tmp_path, lambda: gymnasium.make("CartPole-v1"), "vtrace", **VTRACE)


def test_settings_of_impala_are_refused_in_a_local_run(tmp_path: Path) -> None:
    from ludus.cli.train import parse
    from ludus.runs.train import train_resolved

    with pytest.raises(UserError, match=r"impala\.workers is 3, but container is local"):
        train_resolved(parse(["CartPole-v1", "--workers", "3", "--runs", str(tmp_path), "--quiet"]))


def test_killed_and_stopped_workers_are_replaced_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, tmp_path.name)
    seen: list[float] = []

    def hurt(values: Any, host: Any) -> None:
        workers = [worker.process for worker in host.channel._workers]
        seen.append(values["impala/version"])
        if len(seen) == 3:
            workers[0].send(signal.SIGKILL)
        if len(seen) == 6:
            workers[1].send(signal.SIGSTOP)

    settings = VTRACE | {"nb_step": 100_000, "impala__timeout": 3.0, "impala__max_restarts": 30}

    def stop(values: Any, host: Any) -> bool:
        hurt(values, host)
        return host.channel.restarts < 2 or len(seen) < 20

    result = train(tmp_path, "CartPole-v1", "vtrace", stop, **settings)
    assert seen == sorted(seen)
    log = (result.run / "log.txt").read_text()
    assert "was killed by SIGKILL; it is replaced" in log
    assert "hung: no answer within 3 s; it is replaced" in log
    assert alive(tmp_path.name) == []


def test_a_dead_worker_is_noticed_while_others_have_unrolls(tmp_path: Path) -> None:
    seen: list[int] = []

    def wait_for_the_other(values: Any, host: Any) -> bool:
        first, second = host.channel._workers
        seen.append(host.channel.restarts)
        if len(seen) == 3:
            first.process.send(signal.SIGKILL)
            first.process.wait(10)
        while len(seen) >= 3 and second.memory.worker[0] == second.received:  # so that the host need not wait
            time.sleep(0.01)
        time.sleep(0.01)
        return not seen[-1] and len(seen) < 500

    settings = VTRACE | {"nb_step": 100_000, "impala__timeout": 3.0, "impala__unrolls": 1}
    train(tmp_path, "CartPole-v1", "vtrace", wait_for_the_other, **settings)
    assert seen[-1] == 1


def test_one_worker_computes_the_actions_of_several_environment_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, tmp_path.name)
    with_torch: dict[str, list[bool]] = {}

    def look(values: Any, host: Any) -> bool:
        (worker,) = [known.process.pid for known in host.channel._workers]
        (server,) = [pid for pid in alive(tmp_path.name) if parent(pid) == worker]
        groups = {"worker": [worker], "environments": [pid for pid in alive(tmp_path.name) if parent(pid) == server]}
        for name, pids in groups.items():
            with_torch[name] = ["libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids]
        return False

    changes = {"impala__workers": 1, "impala__device": "cpu", "env__backend": "subproc", "env__workers": 2}
    train(tmp_path, "CartPole-v1", "vtrace", look, **VTRACE | changes | {"nb_step": 1000})
    assert with_torch == {"worker": [True], "environments": [False, False]}
    assert alive(tmp_path.name) == []


@pytest.mark.slow
def test_workers_wait_for_a_host_that_pauses_and_go_on_after_it(tmp_path: Path) -> None:
    seen: list[tuple[float, int]] = []

    def pause(values: Any, host: Any) -> None:
        seen.append((values["impala/version"], host.channel.restarts))
        if len(seen) != 5:
            return
        while host.channel.queued() < 6:  # 2 workers with 3 slots
            time.sleep(0.01)
        memory = [worker.memory for worker in host.channel._workers]
        submitted = [int(known.worker[0]) for known in memory]
        while not all(known.worker[2] for known in memory):  # they wait for the host
            time.sleep(0.01)
        time.sleep(2.0)
        assert [int(known.worker[0]) for known in memory] == submitted
        assert host.channel.queued() == 6

    changes = {"impala__workers": 2, "impala__queue": 2, "impala__timeout": 20.0, "nb_step": 3000}
    result = train(tmp_path, "CartPole-v1", "vtrace", pause, **VTRACE | changes)
    assert result.steps >= 3000
    assert seen == sorted(seen)
    assert seen[-1][1] == 0


@pytest.mark.slow
def test_the_error_of_a_worker_that_cannot_start_is_raised() -> None:
    with host_channel() as channel, pytest.raises(UserError, match="the wheel fell off"):
        channel.start([None])


@contextmanager
def host_channel() -> Iterator[SharedHostChannel]:
    unroll, state = {"reward": torch.zeros(2, 1)}, {"weight": torch.zeros(3)}
    channel = SharedHostChannel([Rows.all(1)], 1, unroll, state, {}, target="impala_worlds:fail")
    try:
        yield channel
    finally:
        channel.close()


def test_workers_that_fail_too_often_end_the_run_with_the_last_error(tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    orders.write_text("raise")
    settings = VTRACE | {"env__options": (f"orders='{orders}'",), "impala__max_restarts": 0, "nb_step": 10_000_000}
    settings |= {"impala__workers": 1, "env__num": 1}
    with pytest.raises(UserError, match=r"More than 0 workers failed .* raised ValueError: the wheel fell off"):
        train(tmp_path, "ray_worlds:Sick", "vtrace", **settings)


@pytest.mark.slow
def test_nothing_is_left_of_a_host_that_is_killed_and_a_resume_continues(tmp_path: Path) -> None:
    words = "train CartPole-v1 --agent vtrace --container impala --nb-step 100000000 --checkpoint-every 1 --compile off"
    before = named_memory()
    host = start([*words.split(), "--threads", "1", "--quiet"], tmp_path.name, tmp_path)
    while not (found := list(tmp_path.glob("runs/*/*/checkpoints/step_*"))) and host.poll() is None:
        time.sleep(0.05)
    assert len(alive(tmp_path.name)) == 4  # host, server and two workers
    host.kill()
    host.wait()
    while alive(tmp_path.name):
        time.sleep(0.05)
    assert left_behind(before) == []
    run = found[0].parents[1]
    resumed = ludus.resume(run, on_update=lambda values: False)
    assert resumed.steps > 0
    assert "unrolls that workers had finished ahead" in (run / "log.txt").read_text()


@pytest.mark.parametrize("body", ["mlp", "lstm"])
def test_a3c_with_one_worker_in_lockstep_is_a2c(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"network__body": body, "agent__rollout": 8, "agent__n_step": 0}
    local = make_worker("CartPole-v1", "a2c", nb_step=10_000, **changes)
    local.run(256)
    with host_here(monkeypatch, "a3c", **LOCKSTEP, **changes) as host:
        host.run(256)
        assert (host.local_step_count, host.updates) == (local.local_step_count, local.updates)
        expected = local.agent.state_dict()
        for name, x in host.agent.state_dict().items():
            assert torch.allclose(x, expected[name], atol=1e-5), name
    local.close()


def test_gradients_of_several_workers_are_applied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_here(monkeypatch, "a3c", impala__workers=2, log_every=0) as host:
        for _ in range(6):
            host.run(host.local_step_count + 1, host.local_step_count)
        assert host.updates == host.version == 6
        assert host._held == []


@pytest.mark.parametrize("agent", ["vtrace", "a3c", "dqn"])
def test_workers_take_turns_where_they_wait_for_each_update(agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"impala__workers": 2, "impala__queue": 0} | (
        {"agent__warmup": 0} if agent == "dqn" else {"agent__rollout": 8}
    )
    monkeypatch.delitem(VTRACE, "agent__rollout")
    seen = []
    with host_here(monkeypatch, agent, **changes) as host:
        take = host._take
        monkeypatch.setattr(host, "_take", lambda delivery: seen.append(delivery.worker) or take(delivery))
        for _ in range(4):
            host.run(host.local_step_count + 1, host.local_step_count)
    assert seen == [0, 1] * (len(seen) // 2)
    assert len(seen) == (8 if agent == "vtrace" else 4)


@pytest.mark.parametrize(
    ("agent", "changes"),
    [
        ("dqn", {"agent__prioritized": True, "agent__n_step": 3, "agent__epsilon_ladder": 7.0}),
        pytest.param("dqn", {"agent__normalize_observation": True}, marks=pytest.mark.slow),
        ("r2d2", {"agent__sequence": 8, "agent__burn_in": 4, "agent__overlap": 4}),
        pytest.param("discrete_sac", {"agent__prioritized": True}, marks=pytest.mark.slow),
    ],
)
def test_replay_agents_learn_from_workers(agent: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"agent__warmup": 64, "agent__batch_size": 16, "agent__replay": 2000, "agent__updates_per_step": 0.1}
    changes = {"impala__workers": 2, "env__num": 4} | given | changes
    monkeypatch.delitem(VTRACE, "agent__rollout")
    with host_here(monkeypatch, agent, **changes) as host:
        host.run(400)
        numbers = host.cache.metrics()
        assert host.updates > 10
        assert abs(numbers["replay/updates_per_step"] - 0.1) < 0.03
        assert numbers["replay/size"] > (40 if agent == "r2d2" else 250)
        worker = host.channel.made[0]
        worker._take_weights()
        assert 5 < worker.agent.updates <= host.agent.updates
        drawn = torch.rand(2, generator=worker.agent.generator), torch.rand(2)
        state = worker.state_dict()
        first = torch.rand(2, generator=worker.agent.generator), torch.rand(2)
        worker.load_state_dict(state)
        again = torch.rand(2, generator=worker.agent.generator), torch.rand(2)
        assert torch.equal(torch.stack(again), torch.stack(first))
        assert not torch.equal(torch.stack(again), torch.stack(drawn))
        if agent == "dqn" and host.settings.agent.prioritized:
            assert host.cache._priorities.largest != 1.0
