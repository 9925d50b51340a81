"""A channel over Ray: workers are actors in a cluster; unrolls and acting states go through its object store.

This is the only file that imports Ray. Ray pickles what it sends, so whoever can reach a cluster can run code in it: a
cluster beyond this machine must use Ray's token authentication.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
import torch
from ray._private import ray_constants
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from ludus.containers.channel import (
    START_TIMEOUT,
    ActingState,
    Delivery,
    HostChannel,
    Report,
    WorkerChannel,
    start_error,
)
from ludus.containers.impala_worker import ImpalaWorker, build_worker
from ludus.containers.machines import (
    AUTH_MODE,
    TOKEN,
    code_folders,
    has_token,
    is_loopback,
    refuse_other_versions,
    refuse_without_token,
    use_code_folders,
    uses_token,
    versions,
)
from ludus.core.cache import Unroll
from ludus.core.encoding import from_bytes, to_bytes
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.core.types import State, Tensors
from ludus.environments.config import EnvConfig
from ludus.managers.make import make_manager
from ludus.parallel.child import describe_error
from ludus.parallel.process import GRACE, WorkerError
from ludus.settings.settings import ImpalaConfig
from ludus.settings.trust import LOCAL_CLUSTER

T = TypeVar("T")
Packed = tuple[np.ndarray[Any, Any], tuple[int, ...]]  # the memory of a tensor, and the order of its dimensions there

CONTROL = "control"  # concurrency group of the calls that a worker answers while it acts
ANSWER = 10.0  # seconds in which a cluster must answer
# what opens an HTTP/2 connection, as gRPC does: the answer is a frame of the type SETTINGS
PREFACE, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), b"\x04"
PLACE = 30.0  # seconds to wait for resources at the start if other workers have got theirs
NOTICE = 40.0  # seconds after which Ray knows that a machine is lost, by its default settings
DIED, LOST = "died", "was lost with its machine"
BLOCK = 64 << 20  # bytes of the array with which the object store is measured
FOLDERS, FOLDER = "/tmp", "ludus-ray-"  # where local clusters have their files: paths of sockets must be short
LOCK = "lock"  # file in such a folder, locked while the cluster is in use
USAGE = "RAY_USAGE_STATS_ENABLED"  # environment variables of Ray
SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # off: Ray uses the loopback interface alone
LOCAL_TOKEN = secrets.token_hex(32)  # one per process, since Ray reads it once
QUIET = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "ludus"}


class Cluster:
    """A connection of this process to a Ray cluster; ``auto`` starts one on this machine, and ``close`` ends it."""

    def __init__(self, address: str, cpus: int | None = None) -> None:
        self._folder, self._lock = "", -1
        self._variables: dict[str, str | None] = {}  # environment variables before
        if ray.is_initialized():
            raise UserError("This process is connected to a Ray cluster already; call ray.shutdown() before.")
        try:
            with _same_signal_handlers():
                if address == LOCAL_CLUSTER:
                    self._start(cpus)
                else:
                    self._connect(address)
        except BaseException:
            self.close()
            raise

    def _start(self, cpus: int | None) -> None:
        self._folder, self._lock = _make_folder()
        self._variables = {name: os.environ.get(name) for name in (AUTH_MODE, TOKEN, USAGE, SEVERAL_MACHINES)}
        os.environ[SEVERAL_MACHINES] = "0"
        os.environ.setdefault(USAGE, "0")
        if not has_token():
            os.environ[TOKEN] = LOCAL_TOKEN  # else Ray writes one to the home folder
        try:
            with _on_loopback():
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=self._folder, **QUIET)
        except Exception as error:
            raise UserError(f"Ray could not be started on this machine: {_first_line(error)}.") from error
        if not is_loopback(_address()):
            raise UserError(f"Ray listens on {_address()} instead of 127.0.0.1; install Ray 2.60, or give an address.")

    def _connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        refuse_without_token(address, host)
        if is_loopback(host):
            host = _address()  # as Ray does, which listens on all interfaces, also where 127.0.0.1 leads to it
        try:
            with socket.create_connection((host, int(port)), ANSWER) as probe:
                if not os.environ.get("RAY_USE_TLS"):
                    probe.sendall(PREFACE)
                    if probe.recv(9)[3:4] != SETTINGS:  # else ray.init would wait for minutes
                        raise ConnectionError("what listens there is not Ray")
        except (OSError, OverflowError) as error:
            raise UserError(
                f"The cluster {address} does not answer ({error}); start Ray there with `ray start --head --port "
                f"{port}`, or correct the address."
            ) from error
        refuse_without_token(address, host)
        try:
            ray.init(address=address, **QUIET)
        except Exception as error:
            raise UserError(
                f"Ray cannot connect to the cluster {address}: {_first_line(error)}; this machine must be part of it "
                f"(`ray start --address {address}`) and have the same token and version of Ray."
            ) from error

    def close(self) -> None:
        """Disconnect, and end a cluster that was started here; may be called twice."""
        with _same_signal_handlers():
            ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = ""
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass
class _Worker:
    """What the host knows of a worker."""

    number: int
    rows: Rows
    actor: Any = None
    state: State | None = None  # to start in; None: new episodes
    ready: bool = False
    restored: str = ""  # how its environments were restored
    late: bool = False  # whether it starts while others act
    node: str = ""  # id of its machine in Ray; empty while it waits for resources
    place: str = ""  # process and address of its machine, for messages
    calls: dict[str, Any] = field(default_factory=dict)  # by method: reference to the answer
    unrolls: deque[Any] = field(default_factory=deque)  # references to the unrolls that it was asked for, in order
    held: int = 0  # unrolls that have arrived and were not released
    saved: State | None = None  # its answer to ``save``
    beat: int = -1  # the last heartbeat that was seen
    silent: float = 0.0  # seconds since then

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"worker {self.number}{f' ({self.place})' if self.place else ''}"

    def control(self, method: str) -> Any:
        """Call a method that is answered while the worker acts."""
        return getattr(self.actor, method).options(concurrency_group=CONTROL).remote()

    def awaited(self) -> list[Any]:
        """Return references to the next answers: unrolls are taken in their order."""
        return [*list(self.unrolls)[:1], *self.calls.values()]


class RayHostChannel(HostChannel):
    """Starts workers as actors of a cluster, and exchanges unrolls and acting states with them by the object store.

    A worker is asked for ``impala.queue`` + 1 unrolls at a time. Each request refers to the newest acting state, which
    is stored once per version. Workers that get their resources later join later.
    """

    copies = 1  # to the object store; another one if the worker is on another machine

    def __init__(self, rows: Sequence[Rows], settings: Mapping[str, Any], impala: ImpalaConfig) -> None:
        super().__init__(len(rows), impala.timeout, impala.max_restarts)
        self._slots, self._reserved = impala.queue + 1, impala.reserved()
        self._workers = [_Worker(number, part) for number, part in enumerate(rows)]
        self._failed_on: list[str] = []  # machines of workers that died; "" for workers that raised or hung
        self._arrived: deque[Delivery] = deque()  # unrolls that were not received
        self._state: tuple[int, float, Any, Any] | None = None  # version, progress and references to the tensors
        self._opponents: Any = None  # reference to those of self-play
        self._cluster: Cluster | None = Cluster(impala.cluster, math.ceil(len(rows) * impala.cpus_per_worker))
        needs = {"versions": versions(), "needs_token": not is_loopback(_address())}
        self._settings = dict(settings) | code_folders() | needs
        special = {name: amount for name, amount in self._reserved.items() if name not in ("CPU", "GPU")}
        options = {"num_cpus": impala.cpus_per_worker, "num_gpus": impala.gpus_per_worker, "resources": special}
        self._actor = ray.remote(**options, max_restarts=0, concurrency_groups={CONTROL: 1})(RayWorker)

    def start(self, states: Sequence[State | None]) -> list[str]:
        expected, began = min(self._room(), len(self._workers)), time.monotonic()
        for worker, state in zip(self._workers, states, strict=True):
            worker.state = state
            self._launch(worker.number)
        while not self._enough(expected, time.monotonic() - began):
            for number, error in self._wait(self._interval):
                if not self._workers[number].ready:
                    raise start_error(error, f"{error.name}: ")
                self._replace(number, error)
        late = [worker for worker in self._workers if not worker.ready]
        if late:
            names = ", ".join(str(worker.number) for worker in late)
            self.on_warning(
                f"{len(late)} of {len(self._workers)} workers ({names}) wait for {_amounts(self._reserved)} each; the "
                "others go on without them."
            )
        for worker in late:
            worker.late, worker.restored = True, "it waits for resources" if worker.state else ""
        return [worker.restored for worker in self._workers]

    def publish(self, state: ActingState) -> None:
        if state.opponents is not None:
            self._opponents = ray.put({name: pack(x) for name, x in state.opponents.items()})
        tensors = ray.put({name: pack(x) for name, x in state.tensors.items()})
        self._state = state.version, state.progress, tensors, self._opponents
        for worker in self._workers:
            self._request(worker)

    def receive(self, worker: int | None = None) -> Delivery:
        while True:
            for place, delivery in enumerate(self._arrived):
                if worker in (None, delivery.worker):
                    del self._arrived[place]
                    return delivery
            self._replace_failed(self._interval)

    def release(self, delivery: Delivery) -> None:
        worker = self._workers[delivery.worker]
        worker.held -= 1
        self._request(worker)

    def queued(self) -> int:
        self._replace_failed(0.0)
        return len(self._arrived)

    def save(self) -> list[State | None]:
        before = list(self.incarnations)
        found = {worker.number: worker.state for worker in self._workers if not worker.ready}
        asked = [worker for worker in self._workers if worker.ready]
        for worker in asked:
            worker.saved, worker.calls["save"] = None, worker.actor.save.remote()
        while any("save" in worker.calls for worker in asked):
            self._replace_failed(self._interval)
        found |= {worker.number: worker.saved for worker in asked}
        return [
            found[number] if now == then else None
            for number, (now, then) in enumerate(zip(self.incarnations, before, strict=True))
        ]

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return
        with suppress(RayError):
            closing = [worker.actor.close.remote() for worker in self._workers if worker.ready]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=GRACE)
        for worker in self._workers:
            self._kill(worker)
        self._workers, self._state, self._opponents = [], None, None
        self._arrived.clear()
        cluster.close()

    def _room(self) -> int:
        """Return how many workers fit on the machines of the cluster; refuse if none does."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(min(int(node.get(name, 0) / amount) for name, amount in self._reserved.items()) for node in nodes)
        if not room:
            most = {name: max(node.get(name, 0.0) for node in nodes) for name in self._reserved}
            raise UserError(
                f"A worker reserves {_amounts(self._reserved)}, which no machine of the cluster has (at most "
                f"{_amounts(most)}); lower impala.cpus_per_worker, impala.gpus_per_worker or impala.resources."
            )
        return room

    def _enough(self, expected: int, seconds: float) -> bool:
        """Return whether training can begin: workers are ready, and the others still wait for resources."""
        ready = sum(worker.ready for worker in self._workers)
        starting = any(worker.node and not worker.ready for worker in self._workers)
        if not ready and not starting and seconds > START_TIMEOUT:
            raise UserError(
                f"No worker got {_amounts(self._reserved)} within {START_TIMEOUT:g} s; end what else uses the cluster, "
                "or add machines."
            )
        return ready >= expected or (ready > 0 and not starting and seconds > PLACE)

    def _launch(self, number: int) -> None:
        """Start a worker, once there is room; unrolls that one before it has submitted stay in the queue."""
        worker = self._workers[number]
        self._kill(worker)
        worker.actor, worker.ready, worker.node, worker.place = self._actor.remote(), False, "", ""
        worker.beat, worker.silent, worker.late = -1, 0.0, self._state is not None
        given = {"worker": number, "incarnation": self.incarnations[number], "rows": list(worker.rows)}
        start = worker.actor.start.remote(self._settings | given, to_bytes(worker.state or {}))
        worker.calls = {"locate": worker.control("locate"), "start": start}
        worker.unrolls.clear()

    def _request(self, worker: _Worker) -> None:
        """Ask a worker for as many unrolls as it may have under way."""
        while worker.ready and self._state is not None and len(worker.unrolls) + worker.held < self._slots:
            worker.unrolls.append(worker.actor.unroll.remote(*self._state))

    def _wait(self, seconds: float) -> list[tuple[int, WorkerError]]:
        owners = {call: worker for worker in self._workers for call in worker.awaited()}
        answered, _ = ray.wait(list(owners), timeout=seconds) if owners else ([], [])
        if answered:
            answered, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0)
        failed: dict[int, WorkerError] = {}
        heard: set[int] = set()
        for call in answered:
            worker = owners[call]
            try:
                if worker.number not in failed and self._take(worker, call):
                    heard.add(worker.number)
            except WorkerError as error:
                failed[worker.number] = error
        passed = self._passed()
        for worker in self._workers:
            if worker.number not in failed and (hang := self._check_beat(worker, worker.number in heard, passed)):
                failed[worker.number] = hang
        return list(failed.items())

    def _take(self, worker: _Worker, call: Any) -> bool:
        """Take the answer to a call; return whether it shows that the worker goes on."""
        method = next((name for name, reference in worker.calls.items() if reference == call), "unroll")
        if method == "unroll":
            worker.unrolls.popleft()
        else:
            del worker.calls[method]
        try:
            answer = ray.get(call)
        except RayError as error:
            raise self._death(worker, error) from error
        if isinstance(answer, Failure):
            raise WorkerError(worker.name, answer.what, None, answer.error, "")
        if method == "beat":
            before, worker.beat = worker.beat, int(answer)
            return worker.beat != before
        if method == "unroll":
            worker.held += 1
            unroll = Unroll(unpack(answer.tensors), worker.rows, answer.version, answer.number)
            self._arrived.append(Delivery(worker.number, unroll, answer.report))
        elif method == "locate":
            worker.node, worker.place = answer
        elif method == "save":
            worker.saved = from_bytes(answer) or None
        else:
            worker.ready, worker.restored, worker.state = True, answer, None
            if worker.late:
                self.on_warning(f"{worker.name} has joined.")
            worker.late = False
            self._request(worker)
        return True

    def _check_beat(self, worker: _Worker, heard: bool, passed: float) -> WorkerError | None:
        """Count the seconds since a worker last went on, and ask whether it does; return an error if it hangs."""
        busy = bool(worker.unrolls) or "start" in worker.calls or "save" in worker.calls
        worker.silent = 0.0 if heard or not busy or not worker.node else worker.silent + passed
        limit = self._patience(worker.ready)
        if worker.silent >= limit:
            stack = ""
            with suppress(RayError):
                stack = ray.get(worker.control("stack"), timeout=2 * GRACE)
            return WorkerError(worker.name, f"hung: no answer within {limit:g} s", None, {"traceback": stack}, "")
        if worker.silent >= self._interval and "beat" not in worker.calls:
            worker.calls["beat"] = worker.control("beat")
        return None

    def _death(self, worker: _Worker, error: RayError) -> WorkerError:
        """Return the error of a worker that is gone, or whose unroll is."""
        lost = worker.node and worker.node not in _living_nodes()
        return WorkerError(worker.name, LOST if lost else DIED, None, {}, str(error))

    def _too_many_failures(self, worker: int, error: WorkerError) -> bool:
        """Workers that were lost with their machine do not count; Ray may notice late that a machine is lost."""
        self._failed_on.append(self._workers[worker].node if error.what in (DIED, LOST) else "")
        until = time.monotonic() + (NOTICE if any(self._failed_on) else 0.0)
        while sum(node in {"", *_living_nodes()} for node in self._failed_on) > self._max_restarts:
            if time.monotonic() >= until:
                return True
            time.sleep(0.1)
        return False

    def _kill(self, worker: _Worker) -> None:
        if worker.actor is not None:
            with suppress(RayError):
                ray.kill(worker.actor)


class Filled(NamedTuple):
    """An unroll on its way to the host."""

    version: int
    number: int
    tensors: dict[str, Packed]
    report: Report


class Failure(NamedTuple):
    """An exception in a worker, as data: the host need not import its class."""

    error: dict[str, Any]  # of ``describe_error``

    @property
    def what(self) -> str:
        """What happened, for messages."""
        return f"raised {self.error['type']}: {' '.join(self.error['message'].split()).rstrip('.')}"


class RayWorkerChannel(WorkerChannel):
    """The end of a ``RayHostChannel`` in a worker: the host asks for each unroll, with the newest acting state."""

    memory: Sequence[Tensors | None] = (None,)

    def __init__(self) -> None:
        self.beats = 0
        self.newest: ActingState | None = None
        self.filled: Filled | None = None

    def next_slot(self, state: Callable[[], State]) -> int:
        return 0

    def acting_state(self, version: int) -> ActingState | None:
        return None if self.newest is None or self.newest.version == version else self.newest

    def submit(self, unroll: Unroll, report: Report) -> None:
        tensors = {name: pack(x) for name, x in unroll.tensors.items()}
        self.filled = Filled(unroll.version, unroll.number, tensors, report)

    def beat(self) -> None:
        self.beats += 1


class RayWorker:
    """A worker in an actor; the host calls its methods, those of the group ``control`` while it acts."""

    def __init__(self) -> None:
        self._channel = RayWorkerChannel()
        self._worker: ImpalaWorker | None = None
        self._thread = 0

    def locate(self) -> tuple[str, str]:
        """Return the id of this machine, and this process in words."""
        return ray.get_runtime_context().get_node_id(), f"process {os.getpid()} on {_address()}"

    def start(self, given: dict[str, Any], state: bytes) -> str | Failure:
        """Make the environments, or restore them; return how they were restored."""
        self._thread = threading.get_ident()

        def start() -> str:
            refuse_other_versions(given["versions"], _address())
            if given["needs_token"] and not uses_token():
                raise UserError(f"Ray on {_address()} runs without a token; start it with {AUTH_MODE}=token.")
            use_code_folders(given)
            self._worker = build_worker(given, self._channel)
            saved = from_bytes(state)
            return self._worker.load_state_dict(saved) if saved else ""

        return _catch(start)

    def unroll(
        self, version: int, progress: float, tensors: dict[str, Packed], opponents: dict[str, Packed] | None
    ) -> Filled | Failure:
        """Fill an unroll."""

        def fill() -> Filled:
            assert self._worker is not None
            frozen = None if opponents is None else unpack(opponents)
            self._channel.newest = ActingState(version, progress, unpack(tensors), frozen)
            self._worker.fill_unroll()
            assert self._channel.filled is not None
            return self._channel.filled

        return _catch(fill)

    def save(self) -> bytes | Failure:
        """Return the state between two unrolls."""
        worker = self._worker
        assert worker is not None
        return _catch(lambda: to_bytes(worker.state_dict()))

    def beat(self) -> int:
        """Return a number that changes as the worker goes on."""
        return self._channel.beats

    def stack(self) -> str:
        """Return the Python stack of the thread that acts."""
        frame = sys._current_frames().get(self._thread)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def close(self) -> None:
        """Close the environments."""
        if self._worker is not None:
            self._worker.close()


def _catch(function: Callable[[], T]) -> T | Failure:
    """Return the result, or the exception as a ``Failure``."""
    try:
        return function()
    except BaseException as error:
        return Failure(describe_error(error))


def pack(x: Tensor) -> Packed:
    """Return the memory of a tensor as a contiguous array, which the object store holds without another copy."""
    order = tuple(sorted(range(x.dim()), key=x.stride, reverse=True))
    return x.detach().permute(order).contiguous().cpu().numpy(), order


def unpack(packed: Mapping[str, Packed]) -> Tensors:
    """Return the tensors in packed arrays; they must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return {
            name: torch.from_numpy(array).permute(tuple(np.argsort(order).tolist()))
            for name, (array, order) in packed.items()
        }


class NodeReport(NamedTuple):
    """What ``ludus cluster check`` tells of a machine."""

    address: str
    cpus: float
    gpus: float
    found: dict[str, str]  # versions
    has_token: bool
    problem: str  # why the environment cannot be made there
    bytes_per_second: float  # from its object store to this process


def inspect_cluster(address: str, env: EnvConfig | None) -> list[NodeReport]:
    """Return a report of each machine of a cluster, which makes the environment ``env`` for it."""
    cluster = Cluster(address)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        inspect, block = (ray.remote(num_cpus=0)(function) for function in (_inspect, _make_block))
        places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        calls = [inspect.options(scheduling_strategy=place).remote(code_folders(), env) for place in places]
        reports = []
        for node, place, call in zip(nodes, places, calls, strict=True):
            found, with_token, problem, speed = {}, False, "", 0.0
            try:
                found, with_token, problem = ray.get(call, timeout=START_TIMEOUT)
                began = time.perf_counter()
                array = ray.get(block.options(scheduling_strategy=place).remote(), timeout=START_TIMEOUT)
                speed = array.nbytes / (time.perf_counter() - began)
            except RayError as error:
                problem = _first_line(error)
            cpus, gpus = (node["Resources"].get(name, 0) for name in ("CPU", "GPU"))
            reports.append(NodeReport(node["NodeManagerAddress"], cpus, gpus, found, with_token, problem, speed))
        return reports
    finally:
        cluster.close()


def _inspect(folders: dict[str, Any], env: EnvConfig | None) -> tuple[dict[str, str], bool, str]:
    problem = ""
    use_code_folders(folders)
    try:
        if env is not None:
            make_manager(env, 1).close()
    except Exception as error:
        problem = _first_line(error)
    return versions(), uses_token(), problem


def _make_block() -> np.ndarray[Any, Any]:
    return np.ones(BLOCK, np.uint8)


def _living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _address() -> str:
    return str(ray.util.get_node_ip_address())


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(".: ")


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray use 127.0.0.1 in this process, as it does where there are no clusters (macOS and Windows).

    Nothing public does it: ``ray.init`` replaces 127.0.0.1 by the address in the network, and Ray has read the variable
    ``SEVERAL_MACHINES`` when it was imported. Other addresses of this machine (127.0.0.2) are not enough, because the
    agent of ``ray[default]`` then listens on all interfaces.
    """
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _make_folder() -> tuple[str, int]:
    """Make a folder for the files of a local cluster; return it with the lock that shows that it is in use.

    Folders of processes that were killed are deleted.
    """
    for left in Path(FOLDERS).glob(f"{FOLDER}*/{LOCK}"):
        with suppress(OSError):
            fd = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent, ignore_errors=True)
            os.close(fd)
    folder = tempfile.mkdtemp(prefix=FOLDER, dir=FOLDERS)
    new = os.path.join(folder, f"{LOCK}.new")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(new, os.path.join(folder, LOCK))
    return folder, fd
