"""The processes of a data-parallel run, connected by torch.distributed."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store

from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.parallel.shared_sum import SharedSum

POLL = timedelta(seconds=0.5)  # how long to wait before signals and other processes are looked at
GRACE = 5.0  # seconds for a process to end after its connection was closed
INTERFACE = "GLOO_SOCKET_IFNAME"  # environment variable: the network interface of gloo
LOOPBACK = "lo"
SHARED_BYTES = 16 << 20  # shared memory for the terms of one sum over ranks; larger sums go by gloo
SHARED_TYPES = (torch.float32, torch.float64, torch.int64, torch.uint8)
READY = "ready"  # key in the store: the number of ranks that are about to connect


class RankLost(UserError):
    """Another rank has ended or does not answer."""


class TorchRun(NamedTuple):
    """The place of this process among those that torchrun started."""

    rank: int
    ranks: int
    local_rank: int  # on this machine
    local_ranks: int


def torchrun() -> TorchRun | None:
    """Return what torchrun set in the environment; None if it did not start this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return TorchRun(*(int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


class RankGroup:
    """Sums tensors and exchanges bytes between the ranks of a run.

    By torch.distributed, or for small sums in shared memory, where ranks have some: a sum by gloo takes as long as a
    step of a small network. While it waits, signals are handled, and the processes of other ranks are looked at, if
    ``watch`` was called.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self._timeout = rank, size, timeout
        self._check: Callable[[], object] | None = None
        self._shared: SharedSum | None = None

    def rows(self, total: int) -> Rows:
        """Return the rows of this rank."""
        return Rows.of_rank(self.rank, self.size, total)

    def watch(self, check: Callable[[], object]) -> None:
        """Let ``check`` raise the error of another rank whose process has ended."""
        self._check = check

    def check(self) -> None:
        """Raise the error of another rank that has ended, if it is known."""
        if self._check is not None:
            self._check()

    def connect(self, device: torch.device, store: Store | None = None, shared: SharedSum | None = None) -> None:
        """Connect to the other ranks; they meet in ``store``, on this machine, or by default where torchrun says.

        ``shared`` is what sums in their shared memory, given to all or to none.
        """
        global _connected
        self._shared = shared
        if self.size == 1:
            _connected = self
            return
        if distributed.is_initialized():
            raise UserError(
                "container is distrib, but torch.distributed is in use in this process already; call "
                "torch.distributed.destroy_process_group() before training."
            )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        options: dict[str, Any] = {"timeout": timedelta(seconds=self._timeout)}
        if store is None:
            distributed.init_process_group(backend, **options)
        else:
            self._meet(store)
            with _interface(LOOPBACK):
                distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, **options)
        _connected = self

    def _meet(self, store: Store) -> None:
        """Wait until all ranks are about to connect, since connecting itself cannot be interrupted."""
        store.add(READY, 1)
        until = time.monotonic() + self._timeout
        while store.add(READY, 0) < self.size:
            self.check()
            if time.monotonic() > until:
                raise RankLost(f"Not all ranks were ready within {self._timeout:g} s (distrib.timeout).")
            time.sleep(0.02)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over ranks."""
        shared = self._shared
        if shared is not None and x.is_cpu and x.nbytes <= shared.nbytes and x.dtype in SHARED_TYPES:
            return torch.from_numpy(shared.sum(x.detach().numpy(), self._look_around))
        total = x.clone()
        if self.size > 1:
            self._wait(distributed.all_reduce(total, async_op=True), total.is_cpu)
        return total

    def gather(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Return the bytes of all ranks, whose sizes they know, by one sum."""
        gathered, start = torch.zeros(sum(sizes), dtype=torch.uint8), sum(sizes[: self.rank])
        gathered.numpy().data[start : start + len(data)] = data
        return [part.numpy().tobytes() for part in torch.split(self.sum(gathered), list(sizes))]

    def exchange(self, parts: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send bytes to ranks by their number; return what others sent to this one, which call this too."""
        sizes = torch.zeros(self.size, self.size, dtype=torch.int64)  # [from, to]
        for to, data in parts.items():
            sizes[self.rank, to] = len(data)
        sizes = self.sum(sizes)
        sent, received = sizes[self.rank].tolist(), sizes[:, self.rank].tolist()
        given = torch.zeros(sum(sent), dtype=torch.uint8)
        given.numpy().data[:] = b"".join(parts.get(to, b"") for to in range(self.size))
        taken = torch.empty(sum(received), dtype=torch.uint8)
        if self.size > 1:
            self._wait(distributed.all_to_all_single(taken, given, received, sent, async_op=True), True)
        else:
            taken = given
        found = zip(range(self.size), torch.split(taken, received), strict=True)
        return {source: part.numpy().tobytes() for source, part in found if len(part)}

    def close(self) -> None:
        """Disconnect; may be called twice."""
        global _connected
        if _connected is self:
            _connected = None
            if self.size > 1:
                distributed.destroy_process_group()

    def _wait(self, work: Any, polls: bool) -> None:
        """Wait for an operation; one on a GPU is only queued."""
        began = time.monotonic()
        try:
            while polls:
                try:
                    work.wait(POLL)
                    return
                except RuntimeError:  # not yet, or failed
                    if work.is_completed():
                        break
                self._look_around(time.monotonic() - began)
            work.wait()
        except RuntimeError as error:
            until = time.monotonic() + GRACE
            while self._check is not None and time.monotonic() < until:  # it is ending
                self._check()
                time.sleep(0.01)
            raise RankLost(
                "The connection to another rank was lost; its own output tells why. `ludus resume` continues from the "
                "last checkpoint."
            ) from error

    def _look_around(self, waited: float) -> None:
        """Raise if another rank has ended, or has not answered for ``distrib.timeout`` seconds."""
        self.check()
        if waited > self._timeout:
            raise RankLost(f"Another rank did not answer within {self._timeout:g} s (distrib.timeout).")


def make_shared_sum(rank: int, size: int, fd: int | None = None) -> SharedSum | None:
    """Return what sums over ranks in shared memory, that of ``fd`` or new; None where this is not possible."""
    if platform.machine() != "x86_64":  # see ``SharedSum``
        return None
    return SharedSum(rank, size, SHARED_BYTES // size, fd)


_connected: RankGroup | None = None  # of this process, as torch.distributed has one default group


@torch.library.custom_op("ludus::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum over ranks as one operation of a graph; it does not run while the graph is traced."""
    assert _connected is not None
    return _connected.sum(x)


@sum_over_ranks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@contextmanager
def _interface(name: str) -> Iterator[None]:
    """Let gloo use this network interface, unless the user named one."""
    if INTERFACE in os.environ:
        yield
        return
    os.environ[INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[INTERFACE]
