"""Predict throughput and lag of asynchronous training (IMPALA) with 10 to 10,000 workers, by a simulation of events.

A worker plays an unroll with the newest weights, sends it to the host and plays the next one; it waits while ``slots``
of its unrolls are on their way or queued. The host learns from ``batch`` unrolls at a time and then publishes new
weights, which each machine of workers fetches once per version. Costs are measured on this machine, or given:
``python -m benchmarks.scaling --env CartPole-v1``, ``--costs update_step=2e-6``.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # it imports torch, which the simulation does not need
    from benchmarks.scaling_costs import Costs

FINISHED, ARRIVED, UPDATED = range(3)  # events: a worker has played an unroll, the host has it, an update is done
GIGABIT = 1e9 / 8  # bytes per second


@dataclass(frozen=True)
class Setup:
    """What is trained, on which machines."""

    workers: int
    rows: int = 8  # environments per worker
    length: int = 32  # steps of an unroll
    batch: int = 16  # unrolls per update
    slots: int = 2  # unrolls of a worker that are played, on their way or queued at a time
    network: float = 10.0  # Gbit/s of the host in each direction; 0: all in one machine, over shared memory
    latency: float = 2e-4  # seconds of a transfer besides its bytes
    per_machine: int = 32  # workers of a machine, which fetches each version of the weights once
    hosts: int = 1  # hosts that share workers and average their gradients
    compress: bool = False  # unrolls, with zlib
    variation: float = 0.2  # standard deviation of the time for an unroll, as a fraction of its mean
    max_lag: int = 0  # unrolls with a larger lag are dropped; 0: none


class Times(NamedTuple):
    """Seconds that each part is occupied."""

    worker: float  # by one unroll
    load: float  # of a worker, by new weights
    arrival: float  # of the host's incoming link, by one unroll
    update: float  # of the host, by one update with its publishing
    fetch: float  # of the host's outgoing link, by one machine's copy of the weights

    @classmethod
    def of(cls, costs: Costs, setup: Setup) -> Times:
        """Add up the costs."""
        steps = setup.rows * setup.length
        size = steps * costs.unroll_bytes
        link = setup.network * GIGABIT
        worker = setup.length * (setup.rows * costs.env_step + costs.inference)
        update = costs.update_fixed + setup.batch * (
            steps * costs.update_step + costs.copy_fixed + size * costs.copy_byte
        )
        sent = size
        if setup.network:
            worker += costs.pack_fixed + size * costs.pack_byte
            update += setup.batch * (costs.unpack_fixed + size * costs.unpack_byte)
        if setup.compress:
            worker, sent = worker + size * costs.compress_byte, size * costs.compressed
            update += setup.batch * size * costs.decompress_byte
        if setup.hosts > 1:  # a ring: each link carries the gradient twice
            update += 2 * (setup.hosts - 1) / setup.hosts * costs.weight_bytes / link + 2 * setup.hosts * setup.latency
        arrival, fetch = (sent / link, costs.weight_bytes / link) if setup.network else (0.0, 0.0)
        return cls(worker, costs.load, arrival, update + costs.publish, fetch)


class Result(NamedTuple):
    """Averages over the second half of a simulation; shares are of the time that a part is occupied."""

    steps_per_second: float  # environment steps that are learned from, all hosts
    lag: float  # mean number of updates between the weights that played an unroll and those that learn from it
    lag_95: float  # 95th percentile
    workers: float  # share of the workers' time in which they play
    host: float  # share of the host's time in updates
    incoming: float  # share of its incoming link
    outgoing: float  # and of its outgoing link
    dropped: float  # share of the unrolls


def limits(times: Times, setup: Setup) -> dict[str, float]:
    """Return the steps per second at which each part would be occupied all the time, all hosts.

    The outgoing link sets none: where it is slow, machines skip versions and the lag grows.
    """
    steps = setup.rows * setup.length
    found = {
        "workers": setup.workers * steps / times.worker,
        "host": setup.hosts * setup.batch * steps / times.update,
    }
    if setup.network:
        found["incoming"] = setup.hosts * steps / times.arrival
    return found


class Simulation:
    """One host and its share of the workers."""

    def __init__(self, times: Times, setup: Setup, seed: int = 0) -> None:
        self.times, self.setup = times, setup
        self.latency = setup.latency if setup.network else 0.0
        self.workers = max(1, setup.workers // setup.hosts)
        machines = -(-self.workers // setup.per_machine)
        self._events: list[tuple[float, int, int, int, int]] = []  # time, number, kind, worker, version
        self._number = count()
        self._random = np.random.default_rng(seed)
        self._factors: list[float] = []
        self._sent = [0] * self.workers  # unrolls that are on their way or queued
        self._waiting = [False] * self.workers
        self._loaded = [0] * self.workers  # version of each worker's weights
        self._fetched = [(0, 0.0)] * machines  # newest version that was ordered, and when it is there
        self._queue: deque[tuple[int, int]] = deque()  # worker, version
        self._incoming_free = self._outgoing_free = 0.0  # when the links have sent all that was given to them
        self._updating, self._taken = False, 0  # unrolls in the batch
        self.version = 0
        self.played = self.fetches = self.arrived = self.dropped = 0
        self.lags: list[int] = []

    def run(self) -> Result:
        """Simulate until the queues are filled, and as long again."""
        setup, times = self.setup, self.times
        turnover = self.workers * setup.slots / setup.batch  # updates that empty full queues
        half = int(100 + 3 * turnover)
        for worker in range(self.workers):  # begin evenly spread
            time = times.worker * (worker + 1) / self.workers
            heapq.heappush(self._events, (time, next(self._number), FINISHED, worker, 0))
        self._advance(half)
        start = self._now
        before = self.played, self.fetches, self.arrived, self.dropped, len(self.lags)
        self._advance(2 * half)
        elapsed = self._now - start
        played, fetches, arrived, dropped, learned = (
            now - then
            for now, then in zip(
                (self.played, self.fetches, self.arrived, self.dropped, len(self.lags)), before, strict=True
            )
        )
        lags = self.lags[-learned:]
        return Result(
            steps_per_second=setup.hosts * learned * setup.rows * setup.length / elapsed,
            lag=float(np.mean(lags)),
            lag_95=float(np.percentile(lags, 95)),
            workers=played * times.worker / (elapsed * self.workers),
            host=half * times.update / elapsed,
            incoming=arrived * times.arrival / elapsed,
            outgoing=fetches * times.fetch / elapsed,
            dropped=dropped / max(1, dropped + learned),
        )

    def _advance(self, version: int) -> None:
        """Process events until a version is published."""
        while self.version < version:
            self._now, _, kind, worker, played_with = heapq.heappop(self._events)
            if kind == FINISHED:
                self.played += 1
                self._send(worker, played_with)
            elif kind == ARRIVED:
                self.arrived += 1
                self._queue.append((worker, played_with))
                self._learn()
            else:
                self.version += 1
                self._updating = False
                self._learn()

    def _send(self, worker: int, played_with: int) -> None:
        """Send a finished unroll, and play the next one if there is a free slot."""
        self._sent[worker] += 1
        self._incoming_free = max(self._incoming_free, self._now) + self.times.arrival
        self._push(self._incoming_free + self.latency, ARRIVED, worker, played_with)
        if self._sent[worker] < self.setup.slots:
            self._play(worker)
        else:
            self._waiting[worker] = True

    def _play(self, worker: int) -> None:
        """Play an unroll with the newest weights."""
        machine = worker // self.setup.per_machine
        version, there = self._fetched[machine]
        if version < self.version:
            self.fetches += 1
            self._outgoing_free = max(self._outgoing_free, self._now) + self.times.fetch
            version, there = self.version, self._outgoing_free + self.latency
            self._fetched[machine] = version, there
        begins = max(self._now, there)
        if self._loaded[worker] < version:
            self._loaded[worker] = version
            begins += self.times.load
        self._push(begins + self.times.worker * self._factor(), FINISHED, worker, version)

    def _learn(self) -> None:
        """Take unrolls while no update runs, and begin one when the batch is full."""
        setup = self.setup
        while not self._updating and self._queue:
            worker, played_with = self._queue.popleft()
            self._sent[worker] -= 1
            if self._waiting[worker]:
                self._waiting[worker] = False
                self._play(worker)
            lag = self.version - played_with
            if setup.max_lag and lag > setup.max_lag:
                self.dropped += 1
                continue
            self.lags.append(lag)
            self._taken += 1
            if self._taken == setup.batch:
                self._taken, self._updating = 0, True
                self._push(self._now + self.times.update, UPDATED, -1, -1)

    def _factor(self) -> float:
        """Return a random factor of a worker's time, with mean 1."""
        variation = self.setup.variation
        if not variation:
            return 1.0
        if not self._factors:
            self._factors = self._random.gamma(variation**-2, variation**2, 4096).tolist()
        return self._factors.pop()

    def _push(self, time: float, kind: int, worker: int, version: int) -> None:
        heapq.heappush(self._events, (time, next(self._number), kind, worker, version))


def simulate(costs: Costs, setup: Setup) -> Result:
    return Simulation(Times.of(costs, setup), setup).run()


def busiest(result: Result) -> str:
    shares = {"workers": result.workers, "host": result.host, "incoming link": result.incoming}
    shares["outgoing link"] = result.outgoing
    return max(shares, key=shares.__getitem__)


def table(costs: Costs, setups: Sequence[tuple[str, Setup]], title: str) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        f"| {title} | steps/s | lag, mean (95%) | workers play | host learns | link in | link out | busiest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, setup in setups:
        x = simulate(costs, setup)
        shares = " | ".join(f"{share:.0%}" for share in (x.workers, x.host, x.incoming, x.outgoing))
        dropped = f", {x.dropped:.0%} dropped" if x.dropped else ""
        lag = f"{x.lag:.1f} ({x.lag_95:.0f}){dropped}"
        lines.append(f"| {name} | {x.steps_per_second:,.0f} | {lag} | {shares} | {busiest(x)} |")
    return "\n".join(lines)


def remedies(setup: Setup) -> list[tuple[str, Setup]]:
    """Return what could be changed where the host or its links are the limit."""
    found = [
        ("as above", setup),
        ("unrolls of 4 times the steps", replace(setup, length=4 * setup.length)),
        ("4 times the unrolls per update", replace(setup, batch=4 * setup.batch)),
        ("1 slot per worker", replace(setup, slots=1)),
    ]
    if not setup.network:
        return found
    return [
        *found,
        ("compressed unrolls", replace(setup, compress=True)),
        ("4 hosts", replace(setup, hosts=4)),
        ("16 hosts", replace(setup, hosts=16)),
        ("16 hosts, compressed unrolls", replace(setup, hosts=16, compress=True)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--agent", default="vtrace")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 30, 100, 300, 1000, 3000, 10_000])
    parser.add_argument("--costs", nargs="*", default=[], metavar="NAME=VALUE", help="costs that are not measured here")
    parser.add_argument("--remedies", type=int, default=0, metavar="WORKERS", help="try changes with this many workers")
    for field in fields(Setup):
        if field.name not in ("workers", "compress"):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument(
        "--settings", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the run to measure"
    )
    parser.add_argument("--compress", action="store_true")
    parser.add_argument(
        "--measured-batch", type=int, default=0, help="unrolls per update when measuring; 0: as --batch"
    )
    given = parser.parse_args()
    from benchmarks.scaling_costs import Costs, measure

    if given.hosts > 1 and not given.network:
        parser.error("--hosts needs --network, the speed of the network between them")
    known = dict(name.partition("=")[::2] for name in given.costs)
    if unknown := known.keys() - {field.name for field in fields(Costs)}:
        parser.error(f"--costs has no {unknown.pop()}; choose from {[field.name for field in fields(Costs)]}")
    numbers = {name: float(value) for name, value in known.items()}
    if len(numbers) == len(fields(Costs)):
        costs = Costs(**numbers)
    else:
        batch = given.measured_batch or given.batch
        settings = dict(word.partition("=")[::2] for word in given.settings)
        costs = replace(measure(given.env, given.agent, given.rows, given.length, batch, settings), **numbers)
    chosen = {field.name: getattr(given, field.name) for field in fields(Setup) if field.name != "workers"}
    setups = [(f"{n:,}", Setup(workers=n, **chosen)) for n in given.workers]
    print("| cost | |\n|---|---|")
    print("\n".join(f"| {name} | {value:.3g} |" for name, value in asdict(costs).items()))
    times = Times.of(costs, setups[-1][1])
    print("\nseconds:", ", ".join(f"{name} {value:.3g}" for name, value in times._asdict().items()))
    print("limits:", ", ".join(f"{k} {v:,.0f} steps/s" for k, v in limits(times, setups[-1][1]).items()), "\n")
    print(table(costs, setups, "workers"))
    if given.remedies:
        print("\n" + table(costs, remedies(Setup(workers=given.remedies, **chosen)), f"{given.remedies:,} workers"))


if __name__ == "__main__":
    main()
