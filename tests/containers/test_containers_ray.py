"""Workers in a Ray cluster, on this machine and on several simulated ones."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from containers_setup import saved, train

import ludus
from benchmarks.soak_watch import MARK, alive, left_behind, named_memory, open_sockets, start
from ludus.cli.main import main
from ludus.core.errors import UserError
from ludus.settings.settings import resolve_settings

pytest.importorskip("ray")
from ray._raylet import Config
from ray.cluster_utils import Cluster as Machines
from ray.util import get_node_ip_address

from ludus.containers import ray as ray_channel
from ludus.containers.machines import AUTH_MODE, TOKEN, TOKEN_PATH, versions
from ludus.containers.ray import pack, unpack

AUTO: dict[str, Any] = {"container": "impala", "impala__cluster": "auto", "agent__rollout": 8, "compile": "off"}
LOCKSTEP: dict[str, Any] = {"impala__workers": 1, "impala__queue": 0}
SICK = "ray_worlds:Sick"
LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}  # as in /proc/net/tcp and tcp6


def folders() -> set[Path]:
    return set(Path(ray_channel.FOLDERS).glob(f"{ray_channel.FOLDER}*"))


@pytest.fixture
def unmarked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is left of the clusters of a test: no process, no named memory, no folder."""
    monkeypatch.setenv(MARK, tmp_path.name)
    monkeypatch.setattr(ray_channel, "FOLDERS", tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # other tests have theirs
    memory = named_memory()
    yield
    until = time.monotonic() + 30
    while alive(tmp_path.name) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(tmp_path.name) == []
    assert left_behind(memory) == []
    assert folders() == set()
    os.rmdir(ray_channel.FOLDERS)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """A cluster with a token and one machine of one CPU; tests add others."""
    monkeypatch.setenv(AUTH_MODE, "token")
    monkeypatch.setenv(TOKEN, ray_channel.LOCAL_TOKEN)
    Config.initialize("")  # in this process, Ray has read the variables already
    cluster = Machines(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


def without_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (AUTH_MODE, TOKEN, TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def workers_of(host: Any) -> list[int]:
    """The processes of the workers, 0 for those that have none."""
    return [int(worker.place.split()[1]) if worker.place else 0 for worker in host.channel._workers]


def assert_same_policy(one: Path, other: Path) -> None:
    expected = saved(other)["agent"]
    for name, x in saved(one)["agent"].items():
        assert torch.equal(x, expected[name]), name


def test_a_worker_in_lockstep_learns_what_a_local_run_learns(tmp_path: Path, unmarked: None) -> None:
    given: dict[str, Any] = {"agent__rollout": 8, "nb_step": 256, "evaluation__every": 128, "log_every": 32}
    local = train(tmp_path / "local", "CartPole-v1", "vtrace", **given)
    listening: set[str] = set()
    copies: set[float] = set()

    def look(values: Any) -> None:
        copies.add(values["impala/copies"])
        listening.update(
            x.split()[1].rpartition(":")[0] for x in open_sockets(alive(tmp_path.name)) if "listening" in x
        )

    over_ray = train(tmp_path, "CartPole-v1", "vtrace", look, **given | AUTO | LOCKSTEP)
    assert listening <= LOOPBACK
    assert listening
    assert copies == {1}  # into the object store
    assert over_ray.evaluation == local.evaluation
    assert_same_policy(over_ray.run, local.run)


@pytest.mark.parametrize("x", [torch.arange(24.0).view(2, 3, 4), torch.tensor(3)])
def test_tensors_keep_values_and_strides(x: torch.Tensor) -> None:
    for given in (x, x.movedim(0, -1) if x.dim() else x):
        (found,) = unpack({"x": pack(given)}).values()
        assert torch.equal(found, given)
        assert found.stride() == given.stride()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster": "ray://a:1"}, 'impala.cluster is "ray://a:1"; give auto, or the address'),
        ({"cluster": "somewhere"}, "as host:port"),
        ({"cluster": "auto", "queue": 2}, "impala.queue is 2, but a worker in a cluster has at most two unrolls"),
        ({"cluster": "auto", "resources": "fast=1"}, "impala.resources is fast=1, but impala.cluster is auto"),
        ({"cluster": "a:1", "resources": "fast"}, 'impala.resources has "fast"; give NAME=AMOUNT'),
        ({"cluster": "auto", "gpus_per_worker": 1.0}, "set both, or none"),
        ({"cluster": "auto", "cpus_per_worker": 0.0}, "impala.cpus_per_worker is 0"),
        ({"cpus_per_worker": 2.0}, "impala.cpus_per_worker is 2.0, but impala.cluster is empty"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    given = {"container": "impala"} | {f"impala.{name}": value for name, value in changes.items()}
    with pytest.raises(UserError, match=words):
        resolve_settings("CartPole-v1", "vtrace", "none", None, given)


def test_ray_that_is_not_installed_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ludus.containers.ray")
    monkeypatch.delattr("ludus.containers.ray")
    with pytest.raises(UserError, match=r"Ray, which is not installed: run `pip install 'ludus\[cluster\]'`"):
        train(tmp_path, "CartPole-v1", "vtrace", **AUTO)


@pytest.mark.parametrize(
    ("address", "variables", "words"),
    [
        ("127.0.0.1:9", {}, "The cluster 127.0.0.1:9 does not answer"),
        ("10.0.0.1:6379", {}, "there is no token, so anyone there could run code in it"),
        ("10.0.0.1:6379", {"RAY_AUTH_TOKEN": "secret"}, "RAY_AUTH_MODE is not token"),
    ],
)
def test_clusters_that_cannot_be_used_are_refused(
    address: str, variables: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_token(monkeypatch, tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        train(tmp_path / "runs", "CartPole-v1", "vtrace", **AUTO | {"impala__cluster": address})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", r"does not answer \(.*timed out"),
        (b"HTTP/1.1 400 Bad Request", r"does not answer \(.*is not Ray"),
        (b"\0\0\0\x04\0\0\0\0\0", "can be reached by other machines, and there is no token"),  # as Ray begins
    ],
)
def test_what_listens_is_refused_if_it_is_not_ray_or_has_no_token(
    answer: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = get_node_ip_address()  # 127.0.0.1 stands for it
    if here.startswith("127.") and "token" in words:
        pytest.skip("this machine has no other address than 127.0.0.1")
    without_token(monkeypatch, tmp_path)
    monkeypatch.setattr(ray_channel, "ANSWER", 0.2 if not answer else 60.0)
    with socket.create_server((here, 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            held.append(server.accept()[0])
            held[0].sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UserError, match=words):
            ray_channel.Cluster(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
        held[0].close()


@pytest.mark.slow
def test_a_stopped_run_in_lockstep_is_resumed_exactly(tmp_path: Path, unmarked: None) -> None:
    given: dict[str, Any] = {"agent__rollout": 8, "nb_step": 320, "evaluation__every": 160}
    local = train(tmp_path / "local", "CartPole-v1", "vtrace", **given)
    stopped = train(tmp_path, "CartPole-v1", "vtrace", lambda values: values["step"] < 170, **given | AUTO | LOCKSTEP)
    assert stopped.steps < 300
    resumed = ludus.resume(stopped.run)
    assert "Environments were restored exactly" in (resumed.run / "log.txt").read_text()
    assert resumed.evaluation == local.evaluation
    assert_same_policy(resumed.run, local.run)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["a3c", "dqn"])
def test_other_agents_learn_from_workers(agent: str, tmp_path: Path, unmarked: None) -> None:
    more = {"agent__warmup": 64, "agent__batch_size": 16, "agent__replay": 2000} if agent == "dqn" else {}
    changes = AUTO | {"nb_step": 800, "agent__prioritized": True} if agent == "dqn" else AUTO | {"nb_step": 800}
    changes.pop("agent__rollout") if agent == "dqn" else None
    assert train(tmp_path, "CartPole-v1", agent, **changes | more).steps >= 800


@pytest.mark.slow
def test_killed_and_stopped_workers_are_replaced(tmp_path: Path, unmarked: None) -> None:
    seen: list[float] = []

    def hurt(values: Any, host: Any) -> bool:
        seen.append(values["impala/version"])
        if len(seen) == 3:
            os.kill(workers_of(host)[0], signal.SIGKILL)
        if host.channel.restarts == 1 and len(seen) > 20 and workers_of(host)[1]:
            os.kill(workers_of(host)[1], signal.SIGSTOP)
        return host.channel.restarts < 2

    settings = AUTO | {"nb_step": 10_000_000, "impala__timeout": 3.0}
    result = train(tmp_path, "CartPole-v1", "vtrace", hurt, **settings)
    assert seen == sorted(seen)
    log = (result.run / "log.txt").read_text()
    assert "died; it is replaced, and its episodes are lost" in log
    assert "hung: no answer within 3 s; it is replaced" in log


@pytest.mark.slow
@pytest.mark.parametrize(("order", "words"), [("raise", "ValueError: the wheel fell off"), ("hang", "time.sleep")])
def test_what_fails_in_a_worker_is_shown(order: str, words: str, tmp_path: Path, unmarked: None) -> None:
    orders = tmp_path / "orders"
    orders.write_text(order)
    settings = AUTO | {"env__options": (f"orders='{orders}'",), "impala__timeout": 3.0, "nb_step": 10_000_000}
    result = train(tmp_path, SICK, "vtrace", lambda values, host: host.channel.restarts < 1, **settings)
    log = (result.run / "log.txt").read_text()
    assert "Remote traceback" in log
    assert words in log
    orders.write_text("raise")
    with pytest.raises(UserError, match=r"More than 0 workers failed .* raised ValueError: the wheel fell off"):
        train(tmp_path, SICK, "vtrace", **settings | {"impala__max_restarts": 0})


@pytest.mark.slow
def test_machines_leave_and_join(machines: Machines, tmp_path: Path) -> None:
    second = machines.add_node(num_cpus=1)
    seen: dict[str, int] = {}

    def change(values: Any, host: Any) -> bool:
        step, ready = int(values["step"]), [worker.ready for worker in host.channel._workers]
        if "left" not in seen:
            assert ready == [True, True]
            machines.remove_node(second, allow_graceful=False)
            seen["left"] = step
        elif "alone" not in seen and not all(ready):
            seen["alone"] = step
        elif "alone" in seen and "joined" not in seen and step > seen["alone"] + 2_000:  # the other worker goes on
            assert not all(ready)
            machines.add_node(num_cpus=1)
            seen["joined"] = step
        return "joined" not in seen or not all(ready)

    settings = AUTO | {"impala__cluster": machines.address, "nb_step": 10_000_000, "impala__max_restarts": 0}
    result = train(tmp_path, "CartPole-v1", "vtrace", change, **settings)
    log = (result.run / "log.txt").read_text()
    assert "it is replaced, and its episodes are lost" in log
    assert "has joined" in log


@pytest.mark.slow
def test_a_worker_without_room_joins_late(machines: Machines, tmp_path: Path) -> None:
    seen: list[int] = []

    def change(values: Any, host: Any) -> bool:
        seen.append(int(values["step"]))
        if len(seen) == 50:
            assert sum(worker.ready for worker in host.channel._workers) == 1
            machines.add_node(num_cpus=1)
        return not all(worker.ready for worker in host.channel._workers)

    settings = AUTO | {"impala__cluster": machines.address, "nb_step": 10_000_000}
    result = train(tmp_path, "CartPole-v1", "vtrace", change, **settings)
    log = (result.run / "log.txt").read_text()
    assert "1 of 2 workers" in log
    assert "has joined" in log
    assert len(seen) > 50
    resumed = ludus.resume(result.run, on_update=lambda values: False)  # all workers have room now
    assert resumed.steps > result.steps


@pytest.mark.slow
def test_what_a_cluster_lacks_is_said_before_training(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = AUTO | {"impala__cluster": machines.address}
    with pytest.raises(UserError, match=r"A worker reserves 7 CPU, which no machine .* \(at most 1 CPU\)"):
        train(tmp_path / "runs", "CartPole-v1", "vtrace", **settings | {"impala__cpus_per_worker": 7.0})
    with pytest.raises(UserError, match="A worker reserves 1 CPU and 1 simulator"):
        train(tmp_path / "runs", "CartPole-v1", "vtrace", **settings | {"impala__resources": "simulator=1"})
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "only_here.py").write_text("from ray_worlds import Sick\n\n\nclass Env(Sick):\n    pass\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path / "code")
        patch.setattr(ray_channel, "code_folders", lambda: {"path": [], "folders": {}})
        with pytest.raises(UserError, match=r"worker .*: environment .* no module only_here to import"):
            train(tmp_path / "runs", "only_here:Env", "vtrace", **settings)
    there = versions()
    monkeypatch.setattr(ray_channel, "versions", lambda: there | {"torch": "1.0"})
    with pytest.raises(UserError, match=r"worker .*: .* has torch .*, and the host has 1.0; install the same"):
        train(tmp_path / "runs", "CartPole-v1", "vtrace", **settings)
    assert not list(tmp_path.glob("runs/*/*"))


@pytest.mark.slow
def test_the_command_tests_a_cluster(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines.add_node(num_cpus=2)
    assert main(["cluster", "check", machines.address, "--env", "CartPole-v1"]) == 0
    out = capsys.readouterr().out
    for words in (
        "token authentication: on",
        "nodes: 2",
        "CPUs: 3",
        f"ludus {ludus.__version__}",
        "CartPole-v1 can be made on all",
        "MB/s",
    ):
        assert words in out
    assert "error" not in out
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", "check", machines.address, "--env", "nowhere_at_all:Env"]) == 1
    assert "error  environment: nowhere_at_all:Env cannot be made" in capsys.readouterr().out
    assert main(["cluster", "check", "127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().out


@pytest.mark.slow
def test_nothing_is_left_of_a_host_that_is_killed_and_a_resume_continues(tmp_path: Path) -> None:
    words = (
        "train CartPole-v1 --agent vtrace --container impala --cluster auto --nb-step 100000000 --checkpoint-every 1"
    )
    before = named_memory()
    others = folders()
    host = start([*words.split(), "--threads", "1", "--quiet", "--compile", "off"], tmp_path.name, tmp_path)
    while not (found := list(tmp_path.glob("runs/*/*/checkpoints/step_*"))) and host.poll() is None:
        time.sleep(0.05)
    host.kill()
    host.wait()
    (folder,) = folders() - others
    until = time.monotonic() + 150  # agents of Ray try to reach it for more than a minute
    while alive(tmp_path.name) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(tmp_path.name) == []
    assert left_behind(before) == []
    run = found[0].parents[1]
    resumed = ludus.resume(run, on_update=lambda values: False)
    assert resumed.steps > 0
    assert "unrolls that workers had finished ahead" in (run / "log.txt").read_text()
    assert not folder.exists()  # the next local cluster deletes the folder of one that was killed


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_saves_and_ends_everything(tmp_path: Path) -> None:
    words = "train CartPole-v1 --agent vtrace --container impala --cluster auto --nb-step 100000000 --compile off"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the jobs of a shell in the background ignore it
    host = start([*words.split(), "--threads", "1", "--quiet"], tmp_path.name, tmp_path)
    while not (found := list(tmp_path.glob("runs/*/*/metrics.jsonl"))) and host.poll() is None:
        time.sleep(0.05)
    time.sleep(1.0)
    for pid in alive(tmp_path.name):  # a terminal sends it to all processes of the group
        os.kill(pid, signal.SIGINT)
    assert host.wait(60) == 128 + signal.SIGINT
    run = found[0].parent
    assert "SIGINT was received" in (run / "log.txt").read_text()
    assert "it is replaced" not in (run / "log.txt").read_text()
    assert ludus.resume(run, on_update=lambda values: False).steps > 0
    until = time.monotonic() + 60
    while alive(tmp_path.name) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(tmp_path.name) == []


@pytest.mark.slow
def test_workers_wait_for_a_host_that_pauses(tmp_path: Path, unmarked: None) -> None:
    seen: list[float] = []

    def pause(values: Any, host: Any) -> bool:
        seen.append(values["impala/version"])
        if len(seen) % 5 == 0:
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                assert host.channel.queued() <= 4  # 2 workers with 2 unrolls
                assert all(len(worker.unrolls) + worker.held <= 2 for worker in host.channel._workers)
        return len(seen) < 20

    settings = AUTO | {"nb_step": 10_000_000, "impala__timeout": 10.0}
    result = train(tmp_path, "CartPole-v1", "vtrace", pause, **settings)
    assert seen == sorted(seen)
    assert "it is replaced" not in (result.run / "log.txt").read_text()


@pytest.mark.slow
def test_a_local_cluster_that_others_could_reach_is_refused(monkeypatch: pytest.MonkeyPatch, unmarked: None) -> None:
    if get_node_ip_address().startswith("127."):
        pytest.skip("this machine has no other address than 127.0.0.1")
    monkeypatch.setattr(ray_channel, "_on_loopback", nullcontext)
    with pytest.raises(UserError, match=r"Ray listens on .* instead of 127.0.0.1"):
        ray_channel.Cluster("auto", 1)
    assert not ray_channel.ray.is_initialized()
