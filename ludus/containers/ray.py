"""IMPALA over Ray: host and workers are actors in a cluster; unrolls and acting states go through its object store.

This is the only file that imports Ray. Ray pickles what it sends, so whoever can reach a cluster can run code in it: a
cluster beyond this machine must use Ray's token authentication.
"""

from __future__ import annotations

import fcntl
import logging
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
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar, cast

import numpy as np
import ray
import torch
from ray._private import ray_constants
from ray.exceptions import RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from ludus.containers import signals
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
    use_environment,
    uses_token,
    versions,
)
from ludus.containers.threads import VARIABLE
from ludus.core.cache import Unroll
from ludus.core.encoding import from_bytes, to_bytes
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.core.types import State, Tensors
from ludus.environments.config import EnvConfig
from ludus.logging.remote import Message, RemoteStream, RemoteTerminal
from ludus.managers.make import make_manager
from ludus.parallel.child import describe_error
from ludus.parallel.process import GRACE, WorkerError
from ludus.settings.settings import ImpalaConfig
from ludus.settings.trust import LOCAL_CLUSTER

T = TypeVar("T")
Packed = tuple[np.ndarray[Any, Any], tuple[int, ...]]  # the memory of a tensor, and the order of its dimensions there

CONTROL = "control"  # concurrency group of the calls that an actor answers while it acts or learns
WAIT = 0.1  # seconds after which the command looks for signals
LISTEN = 1.0  # seconds in which a host answers that there is nothing to show
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
NICENESS = "RAY_worker_niceness"
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
        names = (AUTH_MODE, TOKEN, USAGE, NICENESS, SEVERAL_MACHINES)
        self._variables = {name: os.environ.get(name) for name in names}
        os.environ[SEVERAL_MACHINES] = "0"
        os.environ.setdefault(USAGE, "0")
        # this process's priority; with Ray's 15, a worker beside busy programs took 270 s of START_TIMEOUT to start
        os.environ.setdefault(NICENESS, "0")
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
        self._host_reserved = impala.host_reserved()
        needs = {"versions": versions(), "needs_token": not is_loopback(_address())}
        self._settings = dict(settings) | code_folders() | needs
        self._actor = ray.remote(**_options(self._reserved), concurrency_groups={CONTROL: 1})(RayWorker)

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
        with suppress(RayError):
            closing = [worker.actor.close.remote() for worker in self._workers if worker.ready]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=GRACE)
        for worker in self._workers:
            self._kill(worker)
        self._workers, self._state, self._opponents = [], None, None
        self._arrived.clear()

    def _room(self) -> int:
        """Return how many workers fit on the machines of the cluster beside the host; refuse if none does."""
        nodes, here = _resources(), ray.get_runtime_context().get_node_id()
        for name, amount in self._host_reserved.items():
            nodes[here][name] = nodes[here].get(name, 0.0) - amount
        room = sum(min(int(node.get(name, 0) / x) for name, x in self._reserved.items()) for node in nodes.values())
        if room <= 0:
            settings = "impala.cpus_per_worker, impala.gpus_per_worker or impala.resources"
            raise _no_room("A worker", self._reserved, nodes, settings)
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
    """An exception in an actor, as data: its class need not be imported elsewhere."""

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
        return _locate()

    def start(self, given: dict[str, Any], state: bytes) -> str | Failure:
        """Make the environments, or restore them; return how they were restored."""
        self._thread = threading.get_ident()

        def start() -> str:
            refuse_other_versions(given["versions"], _address(), "the host")
            _refuse_missing_token(given)
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


class HostDied(Exception):
    """A host is gone; the message says how, for the user."""


class RemoteHost:
    """The host of a run, an actor, as the process of the command sees it, which starts and ends it.

    It is on the machine of the command if that has the resources that the host reserves.
    """

    def __init__(self, impala: ImpalaConfig, asked: list[int], waits: bool = False) -> None:
        """Start it; ``asked`` are signals that this process has received and that were not passed on.

        ``waits`` for a machine with its resources if there is none.
        """
        self._asked, self._stops = asked, 0
        self.stopping = 0  # the last signal that was passed on
        self._reserved, self._here = impala.host_reserved(), ray.get_runtime_context().get_node_id()
        nodes, needs = _resources(), self._reserved.items()
        fitting = [node for node, found in nodes.items() if all(found.get(name, 0) >= x for name, x in needs)]
        if not fitting and not waits:
            settings = "impala.host_cpus, impala.host_gpus or impala.host_resources"
            raise _no_room("The host", self._reserved, nodes, settings)
        options = _options(self._reserved)
        if self._here in fitting:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._here, soft=False)
        self._actor = ray.remote(**options, concurrency_groups={CONTROL: 2})(RayHost).remote()
        self._node, self._place = "", ""

    def run(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        folder: Path,
        terminal: tuple[float, int],
        show: Callable[[list[Message]], object],
    ) -> Any:
        """Call ``function(terminal, *arguments)`` in the host, and return its result or raise its exception.

        Messages of the host are passed to ``show``; its terminal has ``terminal`` as seconds between two updates and as
        columns. ``folder`` must be the same on the machine of the host. Raises HostDied if the host is gone.
        """
        try:
            self._node, self._place = self._answer(self._control("locate"))
            with nullcontext(os.getcwd()) if self.here else _marker(folder) as marker:
                given = self._given() | {"terminal": terminal, "marker": marker, "folder": str(folder)}
                self._answer(self._actor.prepare.remote(given))
            return self._follow(self._actor.run.remote(function, *arguments), show)
        except (RayTaskError, RaySystemError) as error:  # not raised by the run: arguments that cannot be unpickled
            raise UserError(f"{self.name} cannot import what it was given: {_last_line(error)}.") from error
        except RayError as error:
            lost = self._node and self._node not in _living_nodes()
            raise HostDied(f"{self.name} {LOST if lost else DIED}") from error

    def end(self) -> None:
        """End the host and, with it, its workers."""
        with suppress(RayError):
            ray.kill(self._actor)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"The host ({self._place})" if self._place else "The host"

    @property
    def here(self) -> bool:
        """Whether it is on the machine of this process."""
        return bool(self._node == self._here)

    def _given(self) -> dict[str, Any]:
        needs = {"versions": versions(), "needs_token": not is_loopback(_address())}
        own = {"environment": dict(os.environ)} if self.here else {}
        reserved = {"gpus": "GPU" in self._reserved, "cpus": "CPU" in self._reserved}
        return code_folders() | needs | own | reserved | {"cwd": os.getcwd()}

    def _control(self, method: str, *arguments: Any) -> Any:
        return getattr(self._actor, method).options(concurrency_group=CONTROL).remote(*arguments)

    def _answer(self, call: Any) -> Any:
        """Wait for the answer to a call before the run begins; a signal ends it at once."""
        until = time.monotonic() + START_TIMEOUT
        while not ray.wait([call], timeout=WAIT)[0]:
            if self._asked:
                raise interruption(self._asked[0])
            if time.monotonic() > until:
                needs = f" (it reserves {_amounts(self._reserved)})" if self._reserved else ""
                raise UserError(
                    f"The host did not start within {START_TIMEOUT:g} s{needs}; end what else uses the cluster, or add "
                    "machines."
                )
        return _result(ray.get(call))

    def _follow(self, run: Any, show: Callable[[list[Message]], object]) -> Any:
        """Show the messages of the host and pass signals on until it has ended."""
        messages, stops = self._control("messages", LISTEN), list[Any]()
        while True:
            ready, _ = ray.wait([run, messages, *stops], timeout=WAIT)
            for call in [call for call in ready if call in stops]:
                stops.remove(call)
                if not ray.get(call):  # the run has not begun
                    raise interruption(self.stopping)
            while self._asked:
                self.stopping, self._stops = self._asked.pop(0), self._stops + 1
                if self._stops > 2:  # the second one stops at once
                    raise interruption(self.stopping)
                stops.append(self._control("stop", self.stopping))
            if messages in ready or run in ready:
                show(ray.get(messages))
                messages = self._control("messages", LISTEN)
            if run in ready:
                show(ray.get(messages))
                return _result(ray.get(run))


class RayHost:
    """A host in an actor; the process of the command calls its methods, those of the group ``control`` meanwhile."""

    def __init__(self) -> None:
        self._terminal = RemoteTerminal()
        self._ended = False

    def locate(self) -> tuple[str, str]:
        """Return the id of this machine, and this process in words."""
        return _locate()

    def prepare(self, given: dict[str, Any]) -> Raised | None:
        """Use the folders, and on its machine the environment variables, of the command; refuse what differs."""

        def prepare() -> None:
            refuse_other_versions(given["versions"], _address(), "the command")
            _refuse_missing_token(given)
            if "environment" in given:
                use_environment(given["environment"], given["gpus"])
            elif not given["cpus"]:
                os.environ.pop(VARIABLE, None)  # Ray sets it to the CPUs that an actor reserves, and at least 1
            for folder, seen in ((given["cwd"], given["cwd"]), (given["folder"], given["marker"])):
                if not os.path.exists(seen):
                    raise UserError(
                        f'The host is on {_address()}, which does not have the folder "{folder}" of this machine; put '
                        "the runs on storage that both share (--runs) and start there, or leave out impala.host_*."
                    )
            os.chdir(given["cwd"])
            use_code_folders(given)
            self._terminal.every, self._terminal.width = given["terminal"]

        return _raised(prepare)

    def run(self, function: Callable[..., T], *arguments: Any) -> T | Raised:
        """Call ``function(terminal, *arguments)``; what it prints is printed by the command."""
        streams = [cast(TextIO, RemoteStream(self._terminal, name)) for name in ("stdout", "stderr")]
        signals.exits = True
        try:
            with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
                return _raised(lambda: function(self._terminal, *arguments))
        finally:
            self._ended = True
            self._terminal.send("write", "stdout", "")  # an answer to who waits for messages

    def messages(self, seconds: float) -> list[Message]:
        """Wait for messages to the user, and return them."""
        return self._terminal.take(0.0 if self._ended else seconds)

    def stop(self, number: int) -> bool:
        """Stop the run as the signal ``number`` does; False if there is none to stop."""
        return signals.stop_runs(number)


class Raised(NamedTuple):
    """An exception in a host."""

    error: BaseException
    traceback: str


class HostTraceback(Exception):
    """The traceback of an exception in a host, as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _raised(function: Callable[[], T]) -> T | Raised:
    """Return the result, or the exception in a form that can be pickled."""
    try:
        return function()
    except BaseException as error:
        shown: BaseException = error
        try:
            ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
        except Exception:
            kind = UserError if isinstance(error, UserError) else RuntimeError
            shown = kind(str(error) if kind is UserError else f"{type(error).__name__}: {error}")
        return Raised(shown, "".join(traceback.format_exception(error)))


def _result(answer: Any) -> Any:
    """Return what a host has returned, or raise what it has raised."""
    if not isinstance(answer, Raised):
        return answer
    if isinstance(answer.error, UserError | KeyboardInterrupt):
        raise answer.error
    raise answer.error from HostTraceback(answer.traceback)


def interruption(number: int) -> BaseException:
    """Return the exception to raise for a signal that ends this process."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def refuse_unpicklable(on_update: Callable[..., Any] | None) -> None:
    """Refuse a function that cannot be sent to a host."""
    try:
        ray.cloudpickle.dumps(on_update)
    except Exception as error:
        raise UserError(
            f"on_update cannot be sent to the host, which is another process ({_last_line(error)}); let it use nothing "
            "that cannot be pickled, such as open files, locks and generators."
        ) from error


@contextmanager
def _marker(folder: Path) -> Iterator[str]:
    """Make a file in a folder, by which another machine sees whether it has the same one."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, path = tempfile.mkstemp(prefix=".shared-", dir=folder)
        os.close(fd)
    except OSError as error:
        raise UserError(
            f'The folder "{folder}" cannot be written ({error.strerror}); choose another --runs.'
        ) from error
    try:
        yield path
    finally:
        os.unlink(path)
        if new:
            with suppress(OSError):  # another process has written to it
                folder.rmdir()


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


def _locate() -> tuple[str, str]:
    return ray.get_runtime_context().get_node_id(), f"process {os.getpid()} on {_address()}"


def _refuse_missing_token(given: Mapping[str, Any]) -> None:
    if given["needs_token"] and not uses_token():
        raise UserError(f"Ray on {_address()} runs without a token; start it with {AUTH_MODE}=token.")


def _resources() -> dict[str, dict[str, float]]:
    """Return all resources of each machine of the cluster, by its id."""
    return {node["NodeID"]: dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}


def _living_nodes() -> set[str]:
    return set(_resources())


def _options(reserved: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an actor that reserves resources."""
    special = {name: amount for name, amount in reserved.items() if name not in ("CPU", "GPU")}
    cpus, gpus = reserved.get("CPU", 0), reserved.get("GPU", 0)
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": special, "max_restarts": 0}


def _no_room(who: str, reserved: Mapping[str, float], nodes: Mapping[str, dict[str, float]], lower: str) -> UserError:
    most = {name: max(node.get(name, 0.0) for node in nodes.values()) for name in reserved}
    return UserError(
        f"{who} reserves {_amounts(reserved)}, which no machine of the cluster has (at most {_amounts(most)}); lower "
        f"{lower}."
    )


def _address() -> str:
    return str(ray.util.get_node_ip_address())


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(".: ")


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".: ")


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
