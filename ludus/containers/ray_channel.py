"""A channel over Ray: workers are actors in a cluster; unrolls and acting states go through its object store.

This is the only file that imports Ray. Ray pickles what it sends, so whoever can reach a cluster can run code in it: a
cluster beyond this machine must use Ray's token authentication.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import platform
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

import ludus
from ludus.containers.channel import ActingState, Delivery, HostChannel, Report, WorkerChannel, too_many_failures
from ludus.containers.impala_worker import ImpalaWorkerCPU, build_worker
from ludus.core import imports
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
START_TIMEOUT = 300.0  # seconds that a worker may take to import torch and to make its environments, at least
PLACE = 30.0  # seconds to wait for resources at the start if other workers have got theirs
NOTICE = 40.0  # seconds after which Ray knows that a machine is lost, by its default settings
POLL = 1.0  # most seconds of one wait
DIED, LOST = "died", "was lost with its machine"
BLOCK = 64 << 20  # bytes of the array with which the object store is measured
FOLDERS, FOLDER = "/tmp", "ludus-ray-"  # where local clusters have their files: paths of sockets must be short
LOCK = "lock"  # file in such a folder, locked while the cluster is in use
# environment variables of Ray
AUTH_MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
USAGE = "RAY_USAGE_STATS_ENABLED"
SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # off: Ray listens on the loopback interface alone
TOKEN_FILE = Path(".ray", "auth_token")  # in the home folder
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
        os.environ.setdefault(USAGE, "0")
        os.environ[SEVERAL_MACHINES] = "0"  # in the processes of Ray: use the loopback interface
        if not _has_token():
            os.environ[TOKEN] = LOCAL_TOKEN  # else Ray writes one to the home folder
        several, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False  # the same in this one
        try:
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=self._folder, **QUIET)
        except Exception as error:
            raise UserError(f"Ray could not be started on this machine: {_first_line(error)}.") from error
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = several

    def _connect(self, address: str) -> None:
        refuse_without_token(address)
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), ANSWER) as probe:
                if not os.environ.get("RAY_USE_TLS"):
                    probe.sendall(PREFACE)
                    if probe.recv(9)[3:4] != SETTINGS:  # else ray.init would wait for minutes
                        raise ConnectionError("what listens there is not Ray")
        except (OSError, OverflowError) as error:
            raise UserError(
                f"The cluster {address} does not answer ({error}); start Ray there with `ray start --head --port "
                f"{port}`, or correct the address."
            ) from error
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
    late: bool = False  # whether the others do not wait for it
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

    copies = 1  # into the object store, where the host reads it

    def __init__(self, rows: Sequence[Rows], settings: Mapping[str, Any], impala: ImpalaConfig) -> None:
        self._slots, self._timeout, self._max_restarts = impala.queue + 1, impala.timeout, impala.max_restarts
        self._interval = min(POLL, impala.timeout / 10)
        self._reserved = impala.reserved()
        needed = {"versions": versions(), "needs_token": not is_local(impala.cluster)}
        self._settings = dict(settings) | code_folders() | needed
        self._workers = [_Worker(number, part) for number, part in enumerate(rows)]
        self.incarnations = [0] * len(rows)
        self._failures = 0  # of workers that raised an exception or hung
        self._died_on: list[str] = []  # machines of workers whose process ended
        self._arrived: deque[Delivery] = deque()  # unrolls that were not received
        self._state: tuple[int, float, Any] | None = None  # version, progress and a reference to the tensors
        self._seen = time.monotonic()  # when the heartbeats were last looked at
        self._cluster: Cluster | None = Cluster(impala.cluster, math.ceil(len(rows) * impala.cpus_per_worker))
        special = {name: amount for name, amount in self._reserved.items() if name not in ("CPU", "GPU")}
        options = {"num_cpus": impala.cpus_per_worker, "num_gpus": impala.gpus_per_worker, "resources": special}
        self._actor = ray.remote(**options, max_restarts=0, concurrency_groups={CONTROL: 1})(RayWorker)

    def start(self, states: Sequence[State | None]) -> list[str]:
        expected, began = min(self._room(), len(self._workers)), time.monotonic()
        for worker, state in zip(self._workers, states, strict=True):
            worker.state = state
            self._launch(worker)
        while not self._enough(expected, time.monotonic() - began):
            for worker, error in self._wait(self._interval):
                if not worker.ready:
                    what = f": {error.user}" if error.user else f" {error.what} when it was started."
                    mistake = UserError(error.name + what)
                    mistake.details = error.user_stack or error.details
                    raise mistake
                self._replace(worker, error)
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
        self._state = state.version, state.progress, ray.put({name: pack(x) for name, x in state.tensors.items()})
        for worker in self._workers:
            self._request(worker)

    def receive(self, worker: int | None = None) -> Delivery:
        while True:
            for place, delivery in enumerate(self._arrived):
                if worker in (None, delivery.worker):
                    del self._arrived[place]
                    return delivery
            self._replace_all(self._wait(self._interval))

    def release(self, delivery: Delivery) -> None:
        worker = self._workers[delivery.worker]
        worker.held -= 1
        self._request(worker)

    def queued(self) -> int:
        self._replace_all(self._wait(0))
        return len(self._arrived)

    def save(self) -> list[State | None]:
        before = list(self.incarnations)
        found = {worker.number: worker.state for worker in self._workers if not worker.ready}
        asked = [worker for worker in self._workers if worker.ready]
        for worker in asked:
            worker.saved, worker.calls["save"] = None, worker.actor.save.remote()
        while any("save" in worker.calls for worker in asked):
            self._replace_all(self._wait(self._interval))
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
        self._workers, self._state = [], None
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

    def _launch(self, worker: _Worker) -> None:
        """Start a worker; unrolls that one before it has submitted stay in the queue."""
        worker.actor, worker.ready, worker.node, worker.place = self._actor.remote(), False, "", ""
        worker.beat, worker.silent = -1, 0.0
        given = {"worker": worker.number, "incarnation": self.incarnations[worker.number], "rows": list(worker.rows)}
        start = worker.actor.start.remote(self._settings | given, to_bytes(worker.state or {}))
        worker.calls = {"locate": worker.control("locate"), "start": start}
        worker.unrolls.clear()

    def _request(self, worker: _Worker) -> None:
        """Ask a worker for as many unrolls as it may have under way."""
        while worker.ready and self._state is not None and len(worker.unrolls) + worker.held < self._slots:
            worker.unrolls.append(worker.actor.unroll.remote(*self._state))

    def _wait(self, seconds: float) -> list[tuple[_Worker, WorkerError]]:
        """Wait until a worker answers; return the workers that died or hang.

        A worker hangs if one step of its environments takes longer than the timeout. Time in which this process was
        suspended or busy does not count.
        """
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
        now = time.monotonic()
        passed, self._seen = min(now - self._seen, POLL), now
        for worker in self._workers:
            if worker.number not in failed and (hang := self._check_beat(worker, worker.number in heard, passed)):
                failed[worker.number] = hang
        return [(self._workers[number], error) for number, error in failed.items()]

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
        limit = self._timeout if worker.ready else max(START_TIMEOUT, self._timeout)
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

    def _too_many_failures(self) -> bool:
        """Return whether more workers failed than may, without those that were lost with their machine."""

        def too_many() -> bool:
            living = {"", *_living_nodes()}
            return self._failures + sum(node in living for node in self._died_on) > self._max_restarts

        until = time.monotonic() + (NOTICE if self._died_on else 0.0)
        while too_many():
            if time.monotonic() >= until:
                return True
            time.sleep(0.1)
        return False

    def _replace_all(self, failed: list[tuple[_Worker, WorkerError]]) -> None:
        for worker, error in failed:
            self._replace(worker, error)

    def _replace(self, worker: _Worker, error: WorkerError) -> None:
        """Report a worker that failed, and start another one with other seeds in its place, once there is room."""
        self.restarts += 1
        died = error.what in (DIED, LOST)
        if died:
            self._died_on.append(worker.node)
        else:
            self._failures += 1
        if self._too_many_failures():
            raise too_many_failures(self._max_restarts, error)
        self.on_warning(f"{error.name} {error.what}; it is replaced, and its episodes are lost.{error.details}")
        self._kill(worker)
        self.incarnations[worker.number] += 1
        worker.late = died
        self._launch(worker)

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
        self._worker: ImpalaWorkerCPU | None = None
        self._thread = 0

    def locate(self) -> tuple[str, str]:
        """Return the id of this machine, and this process in words."""
        return ray.get_runtime_context().get_node_id(), f"process {os.getpid()} on {_address()}"

    def start(self, given: dict[str, Any], state: bytes) -> str | Failure:
        """Make the environments, or restore them; return how they were restored."""
        self._thread = threading.get_ident()

        def start() -> str:
            refuse_other_versions(given["versions"])
            if given["needs_token"] and not _has_token_mode():
                raise UserError(f"Ray on {_address()} runs without a token; start it with {AUTH_MODE}=token.")
            use_code_folders(given)
            self._worker = build_worker(given, self._channel)
            saved = from_bytes(state)
            return self._worker.load_state_dict(saved) if saved else ""

        return _catch(start)

    def unroll(self, version: int, progress: float, tensors: dict[str, Packed]) -> Filled | Failure:
        """Fill an unroll."""

        def fill() -> Filled:
            assert self._worker is not None
            self._channel.newest = ActingState(version, progress, unpack(tensors))
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


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines."""
    return {"ludus": ludus.__version__, "torch": torch.__version__, "Python": platform.python_version()}


def refuse_other_versions(expected: Mapping[str, str]) -> None:
    """Raise a UserError if this machine has other versions than the host."""
    own = versions()
    for name, version in expected.items():
        if own[name] != version:
            raise UserError(
                f"{_address()} has {name} {own[name]}, and the host has {version}; install the same version on all "
                "machines."
            )


def code_folders() -> dict[str, Any]:
    """Return the folders from which this process imports modules, to pass to other machines."""
    here = os.getcwd()
    folders = {top: here if folder == "" else folder for top, folder in imports.search_folders().items()}
    return {"path": [folder or here for folder in sys.path], "folders": folders}


def use_code_folders(given: Mapping[str, Any]) -> None:
    """Import modules from the folders of the host too; those that this machine does not have are ignored."""
    sys.path += [folder for folder in given["path"] if folder not in sys.path]
    imports.set_search_folders(given["folders"])


def is_local(address: str) -> bool:
    """Return whether a cluster can be reached from this machine alone."""
    return address == LOCAL_CLUSTER or address.startswith(("127.", "localhost:", "[::1]:"))


def refuse_without_token(address: str) -> None:
    """Refuse a cluster beyond this machine if this process has no token for it, or does not use it."""
    if is_local(address):
        return
    if not _has_token() or not _has_token_mode():
        missing = f"{AUTH_MODE} is not token" if _has_token() else "there is no token"
        raise UserError(
            f"The cluster {address} is not on this machine, and {missing}, so anyone in the network could run code in "
            f"it; run `ray get-auth-token --generate`, copy ~/{TOKEN_FILE} to all machines, and set {AUTH_MODE}=token "
            "before `ray start` and here."
        )


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
            found, has_token, problem, speed = {}, False, "", 0.0
            try:
                found, has_token, problem = ray.get(call, timeout=START_TIMEOUT)
                began = time.perf_counter()
                array = ray.get(block.options(scheduling_strategy=place).remote(), timeout=START_TIMEOUT)
                speed = array.nbytes / (time.perf_counter() - began)
            except RayError as error:
                problem = _first_line(error)
            room = node["Resources"]
            address = node["NodeManagerAddress"]
            reports.append(
                NodeReport(address, room.get("CPU", 0), room.get("GPU", 0), found, has_token, problem, speed)
            )
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
    return versions(), _has_token_mode(), problem


def _make_block() -> np.ndarray[Any, Any]:
    return np.ones(BLOCK, np.uint8)


def _living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _has_token() -> bool:
    return any(os.environ.get(name) for name in (TOKEN, TOKEN_PATH)) or (Path.home() / TOKEN_FILE).exists()


def _has_token_mode() -> bool:
    return os.environ.get(AUTH_MODE, "disabled") != "disabled"


def _address() -> str:
    return str(ray.util.get_node_ip_address())


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(".: ")


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
