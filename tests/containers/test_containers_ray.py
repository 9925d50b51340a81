"""Host and workers in a Ray cluster, on this machine and on several simulated ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from containers_setup import saved, train

import ludus
from benchmarks.soak_watch import LUDUS, MARK, alive, left_behind, named_memory, open_sockets, start
from ludus.cli.main import main
from ludus.core.errors import UserError
from ludus.runs.train import TrainResult
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


def status(folder: Path) -> dict[str, Any]:
    """What the hook of ``report_to`` has seen last."""
    with suppress(OSError):
        found: dict[str, Any] = json.loads((folder / "status").read_text())
        return found
    return {"step": 0, "ready": [], "node": ""}


def report_to(folder: Path) -> Callable[..., bool]:
    """A hook that writes what it sees in the host to a folder, and ends the run when a file there says so."""

    def report(values: Any, host: Any) -> bool:
        node = ray_channel.ray.get_runtime_context().get_node_id()
        seen = {"step": values["step"], "ready": [worker.ready for worker in host.channel._workers], "node": node}
        (folder / "status.new").write_text(json.dumps(seen))
        os.replace(folder / "status.new", folder / "status")
        return not (folder / "stop").exists()

    return report


def train_beside(folder: Path, work: Callable[[], None], **settings: Any) -> TrainResult:
    """Train with the hook of ``report_to`` in a thread until ``work`` is done, which starts machines in this one."""
    with ThreadPoolExecutor(1) as pool:
        hook = report_to(folder)
        run = pool.submit(train, folder, "CartPole-v1", "vtrace", hook, nb_step=10_000_000, **settings)
        try:
            work()
        finally:
            (folder / "stop").touch()
        return run.result()


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_worker_in_lockstep_learns_what_a_local_run_learns(
    tmp_path: Path, unmarked: None, capfd: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"agent__rollout": 8, "nb_step": 256, "evaluation__every": 128, "log_every": 32}
    local = train(tmp_path / "local", "CartPole-v1", "vtrace", **given)
    command, name = os.getpid(), tmp_path.name

    def look(values: Any) -> None:
        assert os.getpid() != command
        assert os.nice(0) == os.getpriority(os.PRIO_PROCESS, command)
        assert values["impala/copies"] == 1  # into the object store
        for line in open_sockets(alive(name)):
            if "listening" in line:
                print("listens:", line.split()[1].rpartition(":")[0])

    over_ray = train(tmp_path, "CartPole-v1", "vtrace", look, **given | AUTO | LOCKSTEP)
    out = capfd.readouterr().out.splitlines()  # what is printed in the host is printed here
    listening = {line.removeprefix("listens: ") for line in out if line.startswith("listens: ")}
    assert listening <= LOOPBACK
    assert listening
    assert over_ray.reason == "all steps done"
    assert over_ray.evaluation == local.evaluation
    assert_same_policy(over_ray.run, local.run)


def test_a_hook_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()

    def hook(values: Any) -> None:
        with lock:
            pass

    with pytest.raises(UserError, match=r"on_update cannot be sent to the host, .*; let it use nothing that cannot"):
        train(tmp_path / "runs", "CartPole-v1", "vtrace", hook, **AUTO)
    assert not (tmp_path / "runs").exists()


def test_bad_input_is_refused_before_a_cluster_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_channel.Cluster, "__init__", pytest.fail)
    settings = AUTO | {"runs": str(tmp_path / "runs")}
    with pytest.raises(UserError, match="agent a2c cannot learn from unrolls of older policies"):
        train(tmp_path / "runs", "CartPole-v1", "a2c", **settings)
    with pytest.raises(UserError, match="no module nowhere_at_all"):
        train(tmp_path / "runs", "nowhere_at_all:Env", "vtrace", **settings)
    assert not (tmp_path / "runs").exists()


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
        ({"host_gpus": 1.0}, "impala.host_gpus is 1.0, but impala.cluster is empty"),
        ({"cluster": "auto", "host_cpus": -1.0}, "impala.host_cpus is -1; give 0 or a positive number"),
        ({"cluster": "auto", "host_resources": "gpu=1"}, "impala.host_resources is gpu=1, but impala.cluster is auto"),
        ({"cluster": "a:1", "host_resources": "gpu"}, 'impala.host_resources has "gpu"; give NAME=AMOUNT'),
        ({"cluster": "a:1", "host_gpus": 1.0}, "impala.host_gpus is 1, but device is cpu"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    given = {"container": "impala", "device": "cpu"} | {f"impala.{name}": value for name, value in changes.items()}
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
        assert seen == sorted(seen)
        if len(seen) == 3:
            os.kill(workers_of(host)[0], signal.SIGKILL)
        if host.channel.restarts == 1 and len(seen) > 20 and workers_of(host)[1]:
            os.kill(workers_of(host)[1], signal.SIGSTOP)
        return host.channel.restarts < 2

    settings = AUTO | {"nb_step": 10_000_000, "impala__timeout": 3.0}
    result = train(tmp_path, "CartPole-v1", "vtrace", hurt, **settings)
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

    def change() -> None:
        until(lambda: status(tmp_path)["ready"] == [True, True])
        machines.remove_node(second, allow_graceful=False)
        until(lambda: not all(status(tmp_path)["ready"]))
        alone = status(tmp_path)["step"]
        until(lambda: status(tmp_path)["step"] > alone + 2_000)  # the other worker goes on
        assert not all(status(tmp_path)["ready"])
        machines.add_node(num_cpus=1)
        until(lambda: all(status(tmp_path)["ready"]))

    settings = AUTO | {"impala__cluster": machines.address, "impala__max_restarts": 0}
    result = train_beside(tmp_path, change, **settings)
    log = (result.run / "log.txt").read_text()
    assert "it is replaced, and its episodes are lost" in log
    assert "has joined" in log


@pytest.mark.slow
def test_a_worker_without_room_joins_late(machines: Machines, tmp_path: Path) -> None:
    def change() -> None:
        until(lambda: status(tmp_path)["step"] > 1_000)
        assert sum(status(tmp_path)["ready"]) == 1
        machines.add_node(num_cpus=1)
        until(lambda: all(status(tmp_path)["ready"]))

    result = train_beside(tmp_path, change, **AUTO | {"impala__cluster": machines.address})
    log = (result.run / "log.txt").read_text()
    assert "1 of 2 workers" in log
    assert "has joined" in log
    resumed = ludus.resume(result.run, on_update=lambda values: False)  # all workers have room now
    assert resumed.steps > result.steps


@pytest.mark.slow
def test_a_host_that_is_killed_is_replaced_and_learns_the_same(tmp_path: Path, unmarked: None) -> None:
    given: dict[str, Any] = {"agent__rollout": 8, "nb_step": 320, "evaluation__every": 160, "checkpoint_every": 64}
    local = train(tmp_path / "local", "CartPole-v1", "vtrace", **given)

    def die(values: Any) -> None:
        for step in (32, 200):  # before the first checkpoint, and later
            if values["step"] >= step and not (tmp_path / str(step)).exists():
                (tmp_path / str(step)).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    result = train(tmp_path, "CartPole-v1", "vtrace", die, **given | AUTO | LOCKSTEP)
    log = (result.run / "log.txt").read_text()
    assert log.count("The host (process") == 2
    assert "died; there is no checkpoint yet, so a new one starts the run again." in log
    assert "No checkpoint was saved yet: training starts again from step 0." in log
    assert "died; a new one resumes the run from its newest checkpoint." in log
    assert "Environments were restored exactly" in log
    assert result.evaluation == local.evaluation
    assert_same_policy(result.run, local.run)
    assert len(list(result.run.parent.iterdir())) == 1  # in the same folder


@pytest.mark.slow
def test_too_many_hosts_that_die_end_the_run(tmp_path: Path, unmarked: None) -> None:
    def die(values: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match=r"More than 0 hosts failed .* so: The host \(process \d+ on .*\) died; fix"):
        train(tmp_path, "CartPole-v1", "vtrace", die, **AUTO | {"impala__max_restarts": 0})


@pytest.mark.slow
def test_exceptions_in_the_host_are_raised_here(tmp_path: Path, unmarked: None) -> None:
    def refuse(values: Any) -> None:
        raise UserError("Nothing is wrong.")

    def fail(values: Any) -> None:
        raise ZeroDivisionError("in the hook")

    with pytest.raises(UserError, match=r"^Nothing is wrong\.$"):
        train(tmp_path, "CartPole-v1", "vtrace", refuse, **AUTO)
    with pytest.raises(ZeroDivisionError, match=r"^in the hook$") as caught:
        train(tmp_path, "CartPole-v1", "vtrace", fail, **AUTO)
    assert 'raise ZeroDivisionError("in the hook")' in str(caught.value.__cause__)


@pytest.mark.slow
def test_an_error_in_the_host_is_one_sentence_of_the_command(
    tmp_path: Path, unmarked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "orders").write_text("raise")
    words = f"train {SICK} --agent vtrace --container impala --cluster auto --impala.max-restarts 0 --compile off"
    options = ["--env.options", f"orders='{tmp_path / 'orders'}'", "--runs", str(tmp_path)]
    assert main([*words.split(), *options]) == 2
    out, err = capsys.readouterr()
    assert "2 workers over Ray" in out
    assert "Remote traceback" in err
    assert err.splitlines()[-1].startswith("ludus: More than 0 workers failed (impala.max_restarts), the last one so:")
    assert "ray::" not in out + err


@pytest.mark.slow
def test_the_host_is_placed_by_what_it_reserves(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = AUTO | {"impala__cluster": machines.address, "impala__host_resources": "learner=1"}
    with pytest.raises(UserError, match=r"The host reserves 1 learner, which no machine .* lower impala.host_cpus"):
        train(tmp_path / "runs", "CartPole-v1", "vtrace", **settings)
    other = machines.add_node(num_cpus=1, resources={"learner": 1})
    train(tmp_path, "CartPole-v1", "vtrace", report_to(tmp_path), **settings)
    assert status(tmp_path)["node"] == other.node_id
    monkeypatch.setattr(ray_channel, "_marker", lambda folder: nullcontext(str(tmp_path / "not there")))
    with pytest.raises(UserError, match=r"The host is on .*, which does not have the folder .*runs.* of this machine;"):
        train(tmp_path / "runs", "CartPole-v1", "vtrace", **settings)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_host_that_is_lost_with_its_machine_goes_on_elsewhere(machines: Machines, tmp_path: Path) -> None:
    first = machines.add_node(num_cpus=1, resources={"learner": 1})

    def change() -> None:
        until(lambda: bool(list(tmp_path.glob("*/*/checkpoints/step_*"))))
        machines.add_node(num_cpus=1, resources={"learner": 1})
        machines.remove_node(first, allow_graceful=False)
        until(lambda: status(tmp_path)["node"] not in ("", first.node_id))

    given = {"impala__cluster": machines.address, "impala__host_resources": "learner=1"}
    result = train_beside(tmp_path, change, **AUTO | given | {"checkpoint_every": 64})
    log = (result.run / "log.txt").read_text()
    assert "a new one resumes the run from its newest checkpoint." in log
    assert "Resumed at step" in log


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
        with pytest.raises(UserError, match=r"^environment .* no module only_here to import"):
            train(tmp_path / "runs", "only_here:Env", "vtrace", **settings)
    there = versions()
    monkeypatch.setattr(ray_channel, "versions", lambda: there | {"torch": "1.0"})
    with pytest.raises(UserError, match=r".* has torch .*, and the command has 1.0; install the same"):
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
def test_nothing_is_left_of_a_command_that_is_killed_and_a_resume_continues(tmp_path: Path) -> None:
    words = (
        "train CartPole-v1 --agent vtrace --container impala --cluster auto --nb-step 100000000 --checkpoint-every 1"
    )
    before = named_memory()
    others = folders()
    command = start([*words.split(), "--threads", "1", "--quiet", "--compile", "off"], tmp_path.name, tmp_path)
    while not (found := list(tmp_path.glob("runs/*/*/checkpoints/step_*"))) and command.poll() is None:
        time.sleep(0.05)
    command.kill()
    command.wait()
    (folder,) = folders() - others
    end = time.monotonic() + 150  # agents of Ray try to reach it for more than a minute
    while alive(tmp_path.name) and time.monotonic() < end:
        time.sleep(0.05)
    assert alive(tmp_path.name) == []
    assert left_behind(before) == []
    run = found[0].parents[1]
    resumed = ludus.resume(run, on_update=lambda values: False)
    assert resumed.steps > 0
    assert "unrolls that workers had finished ahead" in (run / "log.txt").read_text()
    assert not folder.exists()  # the next local cluster deletes the folder of one that was killed


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_command_saves_and_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    words = "train CartPole-v1 --agent vtrace --container impala --cluster auto --nb-step 100000000 --compile off"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the jobs of a shell in the background ignore it
    environment = os.environ | {MARK: tmp_path.name}
    command = subprocess.Popen(
        [*LUDUS, *words.split(), "--threads", "1"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (found := list(tmp_path.glob("runs/*/*/metrics.jsonl"))) and command.poll() is None:
        time.sleep(0.05)
    time.sleep(1.0)
    # a terminal sends SIGINT to all processes of the group
    for pid in alive(tmp_path.name) if number == signal.SIGINT else [command.pid]:
        os.kill(pid, number)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 128 + signal.SIGINT, err
    assert "Stopping after this update; once more to stop at once." in err
    assert f"Training ended after {saved_steps(found[0].parent):,} steps: {number.name} was received." in out
    assert "ludus resume" in out
    run = found[0].parent
    assert f"{number.name} was received" in (run / "log.txt").read_text()
    assert "it is replaced" not in (run / "log.txt").read_text()
    assert ludus.resume(run, on_update=lambda values: False).steps > 0
    until(lambda: not alive(tmp_path.name), 60)


def saved_steps(run: Path) -> int:
    return int(saved(run)["counters"]["step"])


@pytest.mark.slow
def test_workers_wait_for_a_host_that_pauses(tmp_path: Path, unmarked: None) -> None:
    seen: list[float] = []

    def pause(values: Any, host: Any) -> bool:
        seen.append(values["impala/version"])
        assert seen == sorted(seen)
        if len(seen) % 5 == 0:
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                assert host.channel.queued() <= 4  # 2 workers with 2 unrolls
                assert all(len(worker.unrolls) + worker.held <= 2 for worker in host.channel._workers)
        return len(seen) < 20

    settings = AUTO | {"nb_step": 10_000_000, "impala__timeout": 10.0}
    result = train(tmp_path, "CartPole-v1", "vtrace", pause, **settings)
    assert "it is replaced" not in (result.run / "log.txt").read_text()


@pytest.mark.slow
def test_a_local_cluster_that_others_could_reach_is_refused(monkeypatch: pytest.MonkeyPatch, unmarked: None) -> None:
    if get_node_ip_address().startswith("127."):
        pytest.skip("this machine has no other address than 127.0.0.1")
    monkeypatch.setattr(ray_channel, "_on_loopback", nullcontext)
    with pytest.raises(UserError, match=r"Ray listens on .* instead of 127.0.0.1"):
        ray_channel.Cluster("auto", 1)
    assert not ray_channel.ray.is_initialized()
