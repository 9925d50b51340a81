"""SubProcEnvManager compared with SimpleEnvManager, and failures of workers."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ludus.core.errors import UserError
from ludus.environments.config import EnvConfig
from ludus.managers import worker_pool
from ludus.managers.make import make_manager
from ludus.managers.subproc import SubProcEnvManager
from ludus.managers.worker_pool import split_rows, visible_gpus
from ludus.parallel.process import Launcher

TOY = "ludus.environments.toy"
WORLDS = "subproc_worlds"


@pytest.fixture(autouse=True)
def nothing_left(shared_fork_server):
    """Check that a test leaves no file descriptors or child processes behind."""
    before, running = open_fds(), children()
    yield
    if set(open_fds()) - set(before):
        gc.collect()  # takes long
    assert set(open_fds()) <= set(before)
    assert children() == running


def open_fds():
    return sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))


def children(pid=None):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == (pid or os.getpid()):
            found.append(int(entry.name))
    return found


def config(id, *options, num=5, **more):
    return EnvConfig(id, num, "subproc", options, **{"workers": 2, "timeout": 20.0, **more})


def draw(manager, generator):
    """Return random policy-space actions for all rows."""
    actions = {}
    for name, spec in manager.action.items():
        shape = (manager.batch, *spec.shape)
        if spec.kind == "continuous":
            actions[name] = torch.randn(shape, generator=generator)
        else:
            sizes = torch.tensor(np.reshape(spec.sizes or 2, spec.shape if spec.sizes else ()))
            actions[name] = (torch.rand(shape, generator=generator) * sizes).long()
    return actions


def advance(manager, actions):
    """Step all groups at once."""
    for group, rows in enumerate(manager.groups):
        manager.send({name: x[rows] for name, x in actions.items()}, group)
    for group, rows in enumerate(manager.groups):
        step = manager.recv(group)
        assert len(step.reward) == rows.stop - rows.start
    return manager.last_step()


def same(a, b):
    assert list(a.observation) == list(b.observation)
    for name, x in a.observation.items():
        assert x.dtype == b.observation[name].dtype
        assert torch.equal(x, b.observation[name]), name
    for name in ("reward", "terminated", "truncated", "first"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def text(episodes):
    """Return episodes as text, so that NaN equals NaN."""
    return sorted(map(str, episodes))


CASES = [
    config("CartPole-v1", workers=3),
    config("CartPole-v1", alternate=True),
    config(f"{WORLDS}:Walk"),
    config(f"{WORLDS}:Walk", workers=3, alternate=True),
    config(f"{TOY}:MaskedEnv", "length=4"),
    config(f"{TOY}:MaskedEnv", "in_info=true", workers=1, alternate=True),
    config(f"{TOY}:MixedActionEnv", "more=true", workers=5, alternate=True),
    config(f"{TOY}:TargetEnv", wrappers=("gymnasium.wrappers:FrameStackObservation(stack_size=3)",)),
    config(f"{TOY}:MemoryEnv", max_episode_steps=4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.id.rpartition(':')[2]}-{1 + c.alternate}")
def test_steps_equal_those_of_the_simple_manager(case):
    simple = make_manager(EnvConfig(case.id, case.num, "simple", case.options, case.max_episode_steps, case.mask,
                                    case.wrappers))  # fmt: skip
    ours = SubProcEnvManager(case, case.num)
    action_transform = {name: "clip" for name, spec in simple.action.items() if spec.kind == "continuous"}
    for manager in (simple, ours):
        manager.set_action_transform(action_transform)
    generator = torch.Generator().manual_seed(3)
    assert ours.observation == simple.observation
    assert len(ours.groups) == 1 + case.alternate
    for seed in (11, 12):
        same(ours.reset(seed), simple.reset(seed))
        for _ in range(40):
            actions = draw(simple, generator)
            same(advance(ours, actions), simple.step(actions))
        found = ours.episodes()
        assert text(found) == text(simple.episodes())
        assert case.id == "CartPole-v1" or len(found) > 10
    ours.close()
    ours.close()
    simple.close()


def test_spawned_workers():
    case = config(f"{WORLDS}:Walk", start="spawn", num=2)
    simple, ours = make_manager(EnvConfig(case.id, 2, "simple")), SubProcEnvManager(case, 2)
    same(ours.reset(5), simple.reset(5))
    actions = {"action": torch.tensor([1, 2])}
    same(advance(ours, actions), simple.step(actions))
    ours.close()


def test_workers_do_not_load_torch():
    ours = SubProcEnvManager(config(f"{WORLDS}:Faulty", "length=1"), 4)
    ours.reset(0)
    advance(ours, {"action": torch.zeros(4, dtype=torch.int64)})
    assert [episode.infos["torch"] for episode in ours.episodes()] == [0.0] * 4
    ours.close()


def test_too_many_infos_are_dropped():
    ours = SubProcEnvManager(config(f"{WORLDS}:Walk", "length=1", "many=1000"), 2)
    ours.reset(0)
    for _ in range(6):
        advance(ours, {"action": torch.zeros(2, dtype=torch.int64)})
    infos = ours.episodes()[0].infos
    assert infos["deep/t"] >= 1
    assert infos["number 99"] == 99 / 7
    assert len(infos) < 1000
    ours.close()


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("groups", [[slice(0, 7)], [slice(0, 3), slice(3, 7)]])
def test_rows_are_split_evenly(groups, workers):
    parts = split_rows(groups, workers)
    assert [row for part in parts for row in range(part.start, part.start + part.count)] == list(range(7))
    assert {part.worker for part in parts} == set(range(workers))
    if workers > 1:
        assert len(parts) == workers
        sizes = [part.count for part in parts]
        assert max(sizes) - min(sizes) <= 1


def failing(tmp_path, how, times=1, call="step", **more):
    left = tmp_path / "left"
    left.mkdir()
    options = [f'how="{how}"', f"left='{left}'", f'call="{call}"', "at=3"]
    quick = {"timeout": 6.0} if how in ("hang", "stop", "busy") else {}
    ours = SubProcEnvManager(config(f"{WORLDS}:Faulty", *options, num=4, **(quick | more)), 4)
    fill(left, times)
    reports = []
    ours.on_warning = reports.append
    return ours, reports


def fill(folder, times):
    """Allow a number of failures."""
    for token in range(times):
        (folder / f"{token:03}").touch()


SIGNS = {
    "raise": "raised UserError: subproc_worlds:Faulty: step raised ValueError: a bad day (subproc_worlds.py, line",
    "exit": "ended with exit code 7",
    "kill": "was killed by SIGKILL",
    "crash": "was killed by SIGSEGV",
    "hang": "hung: no answer within 6 s",
    "busy": "hung: no answer within 6 s",
    "stop": "hung: no answer within 6 s",
}
ACTION = {"action": torch.tensor([0, 1, 2, 0])}


@pytest.mark.parametrize("how", list(SIGNS))
def test_failed_worker_is_reported_and_replaced(tmp_path, how):
    ours, reports = failing(tmp_path, how)
    before = ours.reset(7).observation["observation"].clone()
    for _ in range(2):
        advance(ours, ACTION)
    step = advance(ours, ACTION)  # both workers would fail in it; one does
    assert len(reports) == ours.restarts == 1
    row = next(row for row in range(4) if f"environment {row}," in reports[0])
    assert SIGNS[how] in reports[0]
    assert f"episode seed {int(before[row, 0])}, last action {ACTION['action'][row]}" in reports[0]
    assert "about to fail" in reports[0]
    if how in ("raise", "hang", "busy", "crash"):
        assert 'subproc_worlds.py", line' in reports[0]
    lost = list(range(row, row + 2))
    kept = [other for other in range(4) if other not in lost]
    assert step.first.tolist() == [other in lost for other in range(4)]
    assert step.reward.tolist() == [0.0 if other in lost else 3.0 for other in range(4)]
    assert not (step.terminated | step.truncated).any()
    seen = step.observation["observation"]
    assert seen[kept, 0].tolist() == before[kept, 0].tolist()
    assert seen[lost, 0].tolist() == [ours.derive_seed(other, 1) for other in lost]  # the next episodes
    assert set(seen[lost, 2].tolist()).isdisjoint(before[:, 2].tolist())  # in another process
    ends = {}
    for _ in range(8):
        advance(ours, ACTION)
        ends |= {episode.row: episode for episode in ours.episodes() if episode.row not in ends}
    assert {other: (e.length, e.reward, e.seed) for other, e in ends.items()} == {
        other: (6, 21.0, ours.derive_seed(other, 1 if other in lost else 0)) for other in range(4)
    }
    assert ours.restarts == 1
    ours.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_failures_with_two_groups(tmp_path, workers):
    """With one worker, the episodes of the other group are lost too: at once if it is in flight, else when sent."""
    ours, reports = failing(tmp_path, "kill", alternate=True, workers=workers)
    ours.reset(1)
    half = {"action": torch.zeros(2, dtype=torch.int64)}
    for _ in range(2):
        advance(ours, ACTION)
    ours.send(half, 0)
    first = ours.recv(0)  # the other group does not fly
    assert first.first.tolist() == [True, True]
    assert len(reports) == 1
    old = ours.last_step().observation["observation"][2:, 0].tolist()
    ours.send(half, 1)
    second = ours.recv(1)
    alone = workers == 1
    assert second.first.tolist() == [alone, alone]
    expected = [ours.derive_seed(row, 1) for row in (2, 3)] if alone else old
    assert second.observation["observation"][:, 0].tolist() == expected
    assert second.observation["observation"][:, 1].tolist() == ([0, 0] if alone else [3, 3])
    for _ in range(8):
        advance(ours, ACTION)
    assert {e.length for e in ours.episodes()} == {6}
    ours.close()


def test_worker_dies_with_both_groups_in_flight(tmp_path):
    ours, reports = failing(tmp_path, "exit", alternate=True, workers=1)
    ours.reset(1)
    for _ in range(2):
        advance(ours, ACTION)
    step = advance(ours, ACTION)
    assert step.first.tolist() == [True] * 4
    assert step.observation["observation"][:, 0].tolist() == [ours.derive_seed(row, 1) for row in range(4)]
    assert advance(ours, ACTION).observation["observation"][:, 1].tolist() == [1] * 4
    assert len(reports) == 1
    ours.close()


def test_worker_killed_while_idle_and_in_reset(tmp_path):
    ours, reports = failing(tmp_path, "raise", times=2, call="reset")
    ours.reset(3)  # two failures: other episodes begin
    assert len(reports) == 2
    assert "step raised" not in reports[0]
    assert "reset raised ValueError" in reports[0]
    seeds = ours.last_step().observation["observation"][:, 0].tolist()
    numbers = [next(n for n in range(4) if ours.derive_seed(row, n) == seed) for row, seed in enumerate(seeds)]
    assert sum(numbers) in (4, 2 + 2)  # two rows at each failure
    advance(ours, ACTION)
    kill(ours, 0)
    step = advance(ours, ACTION)
    assert step.first.tolist() == [True, True, False, False]
    assert "was killed by SIGKILL" in reports[2]
    after = step.observation["observation"][:, 0].tolist()
    assert after == [ours.derive_seed(row, numbers[row] + (row < 2)) for row in range(4)]
    ours.close()


def test_a_traceback_is_reported_once_and_then_counted(tmp_path):
    ours, reports = failing(tmp_path, "raise", times=5)
    ours.reset(0)
    while len(reports) < 5:
        advance(ours, ACTION)
    assert [report.count("raise ValueError") for report in reports] == [1, 0, 0, 0, 0]
    for times, report in enumerate(reports[1:], 2):
        assert "a bad day" in report
        assert "episode seed" in report
        assert report.endswith(f"The traceback is the same, {times} times now.")
        assert "\n" not in report
    ours.close()


def test_too_many_restarts_raise(tmp_path):
    ours, reports = failing(tmp_path, "raise", times=100, max_restarts=2)
    ours.reset(0)
    for _ in range(2):
        advance(ours, ACTION)
    ours.restarts = 1
    with pytest.raises(UserError, match=r"more than 2 environment workers failed.*a bad day.*episode seed") as caught:
        advance(ours, ACTION)
    assert "\n" not in str(caught.value)
    assert len(reports) == 2
    ours.close()


def test_failing_constructor_counts_as_a_restart(tmp_path):
    ours, reports = failing(tmp_path, "raise", times=2, call="constructor")
    ours.reset(0)
    kill(ours, 1)
    step = advance(ours, ACTION)
    assert step.first.tolist() == [False, False, True, True]
    assert len(reports) == 3
    assert "its constructor raised ValueError: a bad day" in reports[1]
    ours.close()


def test_failing_constructor_raises_at_the_start(tmp_path, monkeypatch):
    left = tmp_path / "left"
    left.mkdir()
    fill(left, 100)
    monkeypatch.setenv("SPARED", str(os.getpid()))  # it works in this process
    for how, says in (("raise", "its constructor raised ValueError: a bad day"), ("exit", "exit code 7")):
        options = [f'how="{how}"', f"left='{left}'", 'call="constructor"']
        with pytest.raises(UserError, match=says) as caught:
            SubProcEnvManager(config(f"{WORLDS}:Faulty", *options), 2)
        assert "\n" not in str(caught.value)


def test_errors_before_workers_start():
    with pytest.raises(UserError, match=r"env.alternate needs 2 environments"):
        SubProcEnvManager(config("CartPole-v1", alternate=True), 1)
    with pytest.raises(UserError, match="interactive session"):
        SubProcEnvManager(config("CartPole-v1"), 2, "__main__:MyEnv")
    with pytest.raises(UserError, match="no environment"):
        SubProcEnvManager(config("CartPoleX-v1"), 2)


@pytest.mark.parametrize(
    ("id", "workers", "alternate", "back"),
    [
        ("CartPole-v1", 2, False, "subproc"),
        (f"{WORLDS}:Walk", 1, True, "subproc"),
        (f"{TOY}:MixedActionEnv", 2, True, "simple"),
    ],
)
def test_state_dict_restores_environments(id, workers, alternate, back):
    case = config(id, workers=workers, alternate=alternate)
    ours = SubProcEnvManager(case, 5)
    generator = torch.Generator().manual_seed(0)
    ours.reset(2)
    for _ in range(23):
        advance(ours, draw(ours, generator))
    state = ours.state_dict()
    actions = [draw(ours, generator) for _ in range(30)]
    other = SubProcEnvManager(case, 5) if back == "subproc" else make_manager(EnvConfig(id, 5, "simple"))
    other.load_state_dict(state)
    assert other.restored == "exactly"
    same(other.last_step(), ours.last_step())
    for action in actions:
        same(advance(other, action), advance(ours, action))
    assert text(other.episodes()) == text(ours.episodes())
    other.close()
    ours.close()


def test_rows_that_cannot_be_restored_start_the_next_episode():
    case = config(f"{WORLDS}:Unsure", num=3)
    ours = SubProcEnvManager(case, 3)
    ours.reset(2)
    for _ in range(2):
        advance(ours, {"action": torch.zeros(3, dtype=torch.int64)})
    state = ours.state_dict()
    ours.load_state_dict(state)
    assert "restarted at an episode boundary" in ours.restored
    assert ours.last_step().first.tolist() == [True] * 3
    assert ours.last_step().observation["observation"][:, 0].tolist() == [ours.derive_seed(row, 1) for row in range(3)]
    assert advance(ours, {"action": torch.zeros(3, dtype=torch.int64)}).first.tolist() == [False] * 3
    ours.close()


def test_worker_dies_while_saving_or_loading():
    ours = SubProcEnvManager(config("CartPole-v1", num=4), 4)
    reports = []
    ours.on_warning = reports.append
    ours.reset(4)
    action = {"action": torch.tensor([0, 1, 0, 1])}
    advance(ours, action)
    kill(ours, 0)
    state = ours.state_dict()
    assert len(reports) == ours.restarts == state["restarts"] == 1
    saved = ours.last_step().observation["observation"].clone()
    assert advance(ours, action).first.tolist() == [True, True, False, False]
    kill(ours, 1)
    ours.load_state_dict(state)
    assert ours.restored.startswith("restarted at an episode boundary: environments 2, 3 of CartPole-v1: its worker")
    assert ours.last_step().first.tolist() == [False, False, True, True]
    assert torch.equal(ours.last_step().observation["observation"][:2], saved[:2])
    assert advance(ours, action).first.tolist() == [False] * 4
    ours.close()


def goes_on_as(state, simple, case, actions):
    """Check that a loaded state continues like a manager without failures."""
    other = SubProcEnvManager(case, case.num)
    other.load_state_dict(state)
    assert other.restored == "exactly"
    same(other.last_step(), simple.last_step())
    same(advance(other, actions), simple.step(actions))
    other.close()


KEPT = f"{WORLDS}:Kept"
SWING = {"action": torch.tensor([0, 1, 2, 3])}


def test_second_save_after_a_failure_contains_the_lost_episodes():
    """The environments of the new worker have not been reset yet and must not be saved."""
    case = config(KEPT, num=4)
    ours, simple = SubProcEnvManager(case, 4), make_manager(EnvConfig(KEPT, 4, "simple"))
    ours.on_warning = [].append
    for manager in (ours, simple):
        manager.reset(4)
        for _ in range(3):
            advance(manager, SWING)
    kill(ours, 0)
    first, second = ours.state_dict(), ours.state_dict()
    assert ours.restarts == 1
    step = advance(ours, SWING)
    assert step.first.tolist() == [True, True, False, False]
    assert [x is None for x in ours.state_dict()["snapshot"]["rows"]] == [False] * 4  # they have begun
    for state in (first, second):
        assert [x is None for x in state["snapshot"]["rows"]] == [True, True, False, False]
        before = simple.state_dict()
        goes_on_as(state, simple, case, SWING)
        simple.load_state_dict(before)
    ours.close()


def test_save_after_an_idle_group_lost_its_worker():
    case = config(KEPT, num=4, workers=1, alternate=True)
    ours, simple = SubProcEnvManager(case, 4), make_manager(EnvConfig(KEPT, 4, "simple"))
    ours.on_warning = [].append
    for manager in (ours, simple):
        manager.reset(4)
        for _ in range(3):
            advance(manager, SWING)
    kill(ours, 0)
    ours.send({"action": SWING["action"][2:]}, 1)
    assert ours.recv(1).first.tolist() == [True, True]  # these begin at once, the others when they are sent
    state = ours.state_dict()
    assert [x is None for x in state["snapshot"]["rows"]] == [True, True, False, False]
    other = SubProcEnvManager(case, 4)
    other.load_state_dict(state)
    assert other.restored == "exactly"
    same(other.last_step(), ours.last_step())
    expected = simple.step(SWING)
    for manager in (other, ours):
        manager.send({"action": SWING["action"][:2]}, 0)
    found = other.recv(0)
    for name, x in expected.observation.items():
        assert torch.equal(found.observation[name], x[:2])
    assert torch.equal(found.reward, expected.reward[:2])
    assert found.first.tolist() == [False, False]
    assert ours.recv(0).first.tolist() == [True, True]
    other.close()
    ours.close()


@pytest.mark.parametrize("alternate", [False, True])
def test_state_can_be_saved_after_too_many_failures(alternate):
    case = config(KEPT, num=4, max_restarts=0, alternate=alternate, workers=1 if alternate else 2)
    ours, simple = SubProcEnvManager(case, 4), make_manager(EnvConfig(KEPT, 4, "simple"))
    ours.on_warning = [].append
    for manager in (ours, simple):
        manager.reset(4)
        advance(manager, SWING)
    kill(ours, 0)
    with pytest.raises(UserError, match="more than 0 environment workers failed"):
        ours.state_dict()
    state = ours.state_dict()
    assert [x is None for x in state["snapshot"]["rows"]] == [True, True, alternate, alternate]
    for again in (lambda: ours.reset(0), lambda: advance(ours, SWING)):
        with pytest.raises(UserError, match=r"more than 0 environment workers failed.*SIGKILL"):
            again()
    goes_on_as(state, simple, case, SWING)
    ours.close()


def test_interrupted_save_leaves_no_pending_orders(monkeypatch):
    case = config(KEPT, num=4)
    ours, simple = SubProcEnvManager(case, 4), make_manager(EnvConfig(KEPT, 4, "simple"))
    for manager in (ours, simple):
        manager.reset(4)
        advance(manager, SWING)

    def interrupt(parts, *args):
        if parts:
            raise KeyboardInterrupt
        return []

    pid = ours._pool._processes[0].pid
    os.kill(pid, signal.SIGSTOP)  # its order is still out when the next save begins
    with monkeypatch.context() as patch:
        patch.setattr(ours._pool, "wait_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ours.state_dict()
    assert ours._pool.is_pending(ours._pool.parts[0])
    waited, awaited = ours._pool.wait_all, []

    def wait_all(parts, *args):
        awaited.append([part.number for part in parts])
        os.kill(pid, signal.SIGCONT)
        return waited(parts, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ours._pool, "wait_all", wait_all)
        state = ours.state_dict()
    assert [0 in numbers for numbers in awaited] == [True, True]  # first for the old order, then for the new one
    assert ours.restarts == 0
    goes_on_as(state, simple, case, SWING)
    ours.close()


def test_busy_workers_are_stopped_together(monkeypatch):
    """The time does not grow with the number of workers."""
    ours = SubProcEnvManager(config("CartPole-v1", workers=4), 4)
    ours.reset(0)
    sent = []
    for worker, process in enumerate(ours._pool._processes):
        os.kill(process.pid, signal.SIGSTOP)  # deaf to all but SIGKILL
        monkeypatch.setattr(process, "send", lambda n, w=worker, send=process.send: (sent.append((n, w)), send(n)))
    ours.close()
    assert sent == [(number, worker) for number in (signal.SIGTERM, signal.SIGKILL) for worker in range(4)]


def kill(manager, worker):
    process = manager._pool._processes[worker]
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60)


def test_state_dict_raises_while_a_group_is_in_flight():
    ours = SubProcEnvManager(config("CartPole-v1"), 2)
    ours.reset(0)
    ours.send({"action": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(RuntimeError, match="not yet received"):
        ours.state_dict()
    ours.reset(0)  # what flew is dropped
    assert ours.last_step().first.all()
    ours.close()


def test_killed_workers_leak_nothing(tmp_path):
    ours, reports = failing(tmp_path, "exit", times=30, max_restarts=100)
    ours.reset(0)
    advance(ours, ACTION)
    before, alive = open_fds(), children()
    while len(reports) < 30:
        advance(ours, ACTION)
    assert open_fds() == before
    assert children() == alive
    assert len(children(alive[0])) == 2  # of the server, zombies included
    ours.close()
    assert children(alive[0]) == []


def test_fork_server_ends_with_its_manager(monkeypatch):
    monkeypatch.setattr(worker_pool, "Launcher", Launcher)
    before = open_fds(), children()
    ours = SubProcEnvManager(config("CartPole-v1"), 2)
    ours.reset(0)
    assert len(children()) == len(before[1]) + 1
    ours.close()
    del ours
    gc.collect()
    assert (open_fds(), children()) == before


KILLED = """
import sys, time, torch
sys.path.insert(0, {here!r})
from ludus.environments.config import EnvConfig
from ludus.managers.subproc import SubProcEnvManager
if __name__ == "__main__":
    manager = SubProcEnvManager(EnvConfig("CartPole-v1", 4, "subproc", workers=2), 4)
    manager.reset(0)
    print("ready", flush=True)
    while True:
        manager.step({{"action": torch.zeros(4, dtype=torch.int64)}})
"""


def test_workers_die_with_a_killed_parent():
    here = str(Path(__file__).parent)
    parent = subprocess.Popen([sys.executable, "-c", KILLED.format(here=here)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    server = children(parent.pid)
    below = server + children(server[0])
    assert len(below) == 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 60
    while time.monotonic() < until and any(running(pid) for pid in below):
        time.sleep(0.01)
    assert not any(running(pid) for pid in below)


def test_timeout_applies_to_each_environment():
    """30 rows of 0.05 s each in one worker take longer than the timeout of 1.4 s in all."""
    case = config(f"{WORLDS}:Slow", "seconds=0.05", num=30, workers=1, timeout=1.4, max_restarts=0)
    ours = SubProcEnvManager(case, 30)
    ours.reset(0)
    advance(ours, {"action": torch.zeros(30, dtype=torch.int64)})
    state = ours.state_dict()
    ours.load_state_dict(state)
    assert ours.restored == "exactly"
    assert ours.restarts == 0
    ours.close()


FROZEN = """
import sys, torch
sys.path.insert(0, {here!r})
from ludus.environments.config import EnvConfig
from ludus.managers.subproc import SubProcEnvManager
if __name__ == "__main__":
    config = EnvConfig("subproc_worlds:Slow", 2, "subproc", ("seconds=0.4",), workers=2, timeout=3.0, max_restarts=0)
    manager = SubProcEnvManager(config, 2)
    manager.reset(0)
    print("ready", flush=True)
    for _ in range(3):
        manager.step({{"action": torch.zeros(2, dtype=torch.int64)}})
    print(manager.restarts, flush=True)
    manager.close()
"""


@pytest.mark.slow  # the next test is quick
def test_time_while_suspended_does_not_count():
    code = FROZEN.format(here=str(Path(__file__).parent))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    (server,) = children(parent.pid)
    tree = [parent.pid, server, *children(server)]
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.5)
    for pid in tree:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)  # the parent looks first
    assert parent.communicate()[0] == "0\n"
    assert parent.returncode == 0


def test_poll_does_not_count_if_the_process_was_suspended():
    assert worker_pool._waited(0.3, 0.5) == 0.3
    assert worker_pool._waited(0.6, 0.5) == 0.5
    assert worker_pool._waited(60.0, 0.5) == 0.0


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("visible", "count", "seen"), [("4,7", 2, [4, 7, 4]), (None, 3, [0, 1, 2]), ("5", 1, [-1] * 3), (None, 0, [-1] * 3)]
)
def test_workers_get_gpus_in_turn(monkeypatch, visible, count, seen):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)  # no machine of ours has them
    with monkeypatch.context() as patch:
        if visible is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = visible_gpus()
    assert found == (visible.split(",") if visible else [str(i) for i in range(count)])
    config = EnvConfig(f"{WORLDS}:Sees", 3, "subproc", workers=3)
    monkeypatch.setattr(worker_pool, "visible_gpus", lambda: found)
    manager = SubProcEnvManager(config, 3)
    try:
        shown = manager.reset(0).observation["observation"][:, 0].tolist()
    finally:
        manager.close()
    assert shown == seen  # with one GPU or none, nothing is said to workers


def test_casts_in_workers_are_reported_once():
    manager = make_manager(EnvConfig(id=f"{WORLDS}:Wide", num=4, backend="subproc", workers=2))
    said = []
    manager.on_warning = said.append
    manager.reset(0)
    for _ in range(3):
        step = manager.step({"action": torch.zeros(4, dtype=torch.int64)})
        assert step.observation["observation"].dtype == torch.float32
        assert step.reward.tolist() == [0.5] * 4
        manager.episodes()
    manager.close()
    manager.episodes()
    assert len(said) == 2
    assert "observations come in a wider float type" in said[0]
    assert "the reward is an array without dimensions" in said[1]
