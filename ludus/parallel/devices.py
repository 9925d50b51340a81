"""Which device computes what: a guess by size, free memory and connections, before anything runs."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ludus.core.errors import UserError

EXHAUSTIVE = 20_000  # assignments that are all tried; where there are more, greedy ones are mended
STARTS = 12  # such greedy ones
TRAFFIC = 1.0  # what it costs to send all traffic across devices, where 1 is a device that does all the work


@dataclass(frozen=True)
class Device:
    """Something that computes: its name as torch spells it, its free memory in bytes, its speed by any one measure."""

    name: str
    free: int
    speed: float = 1.0


def assign(
    sizes: Mapping[str, int], connections: Mapping[tuple[str, str], float], devices: Sequence[Device]
) -> dict[str, str]:
    """Give each part (a network, say) a device.

    ``sizes`` are bytes of memory that each part needs, which also stand for its work; ``connections`` say how much
    passes between two parts, in any one unit. What is made small is the time of the busiest device (its bytes over its
    speed) plus the traffic that crosses devices, both as shares of the whole; memory is never overdrawn. The same
    question always has the same answer.
    """
    _refuse(sizes, connections, devices)
    names, shape = list(sizes), [range(len(devices))] * len(sizes)
    problem = _Problem([sizes[name] for name in names], _numbered(names, connections), devices)
    if len(devices) ** len(names) <= EXHAUSTIVE:
        fitting = (places for places in itertools.product(*shape) if problem.fits(places))
        best = min(fitting, key=problem.cost, default=None)
    else:
        best = problem.search()
    if best is None:
        raise UserError(
            f"{', '.join(f'{name} ({size:,} bytes)' for name, size in sizes.items())} do not fit together on "
            f"{_told(devices)}; make the networks or the replay smaller, or use a device with more memory."
        )
    return {name: devices[place].name for name, place in zip(names, best, strict=True)}


def assign_workers(number: int, devices: Sequence[Device]) -> list[str]:
    """Give each of several equal workers a device, in turn; a device of twice the speed has its turn twice as often."""
    if not devices:
        raise UserError("There is no device to assign workers to; use cpu.")
    counts = [0] * len(devices)
    chosen = []
    for _ in range(number):
        turn = min(range(len(devices)), key=lambda i: ((counts[i] + 1) / devices[i].speed, i))
        counts[turn] += 1
        chosen.append(devices[turn].name)
    return chosen


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int:
    """Bytes of this machine's memory that are to be had, within the limits of the control groups of this process."""
    return min(_available(), cgroup_room())


def cgroup_room(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that the control groups of this process leave it, as a container's limit does; of both versions."""
    room = 1 << 62
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return room
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        top = root / "memory"
        if not controllers:
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        place = top / path.strip("/")
        for folder in (place, *place.parents):
            if folder != top and top not in folder.parents:
                break
            with suppress(OSError, ValueError, KeyError):  # "max", or no such group
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                room = min(room, max(limit - used + int(counts[names[2]]), 0))  # files in memory give way
    return room


def _available() -> int:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # another system than Linux: take it that there is enough
        return 1 << 62


class _Problem:
    """Parts by number, so that a try is a tuple of device numbers."""

    def __init__(
        self, sizes: Sequence[int], pairs: Sequence[tuple[int, int, float]], devices: Sequence[Device]
    ) -> None:
        self.sizes, self.pairs, self.devices = sizes, pairs, devices
        self._work = sum(sizes) / max(device.speed for device in devices) or 1.0  # all of it on the fastest
        self._traffic = sum(weight for _, _, weight in pairs) or 1.0

    def fits(self, places: Sequence[int]) -> bool:
        return all(self._used(places, i) <= device.free for i, device in enumerate(self.devices))

    def cost(self, places: Sequence[int]) -> float:
        busiest = max(self._used(places, i) / device.speed for i, device in enumerate(self.devices))
        crossing = sum(weight for a, b, weight in self.pairs if places[a] != places[b])
        return busiest / self._work + TRAFFIC * crossing / self._traffic

    def search(self) -> tuple[int, ...] | None:
        """The best of several starts, each mended by single moves and swaps for as long as they help."""
        draw, order = random.Random(0), sorted(range(len(self.sizes)), key=lambda i: -self.sizes[i])
        found = []
        for _ in range(STARTS):  # largest first, then in orders by chance
            places = self._fill(order)
            found += [self._mend(places)] if places is not None else []
            draw.shuffle(order)
        return min(map(tuple, found), key=self.cost, default=None)

    def _fill(self, order: Sequence[int]) -> list[int] | None:
        """Place one part after the other where it costs least."""
        places = [-1] * len(self.sizes)
        for part in order:
            tries = [[*places[:part], i, *places[part + 1 :]] for i in range(len(self.devices))]
            fitting = [placed for placed in tries if self.fits(placed)]
            if not fitting:
                return None
            places = min(fitting, key=self.cost)
        return places

    def _mend(self, places: list[int]) -> list[int]:
        while True:
            near = [placed for placed in self._neighbours(places) if self.fits(placed)]
            best = min(near, key=self.cost, default=places)
            if self.cost(best) >= self.cost(places) - 1e-12:
                return places
            places = best

    def _used(self, places: Sequence[int], device: int) -> int:
        return sum(size for size, place in zip(self.sizes, places, strict=True) if place == device)

    def _neighbours(self, places: list[int]) -> list[list[int]]:
        moves = [
            [*places[:part], i, *places[part + 1 :]]
            for part in range(len(places))
            for i in range(len(self.devices))
            if i != places[part]
        ]
        for a, b in itertools.combinations(range(len(places)), 2):
            swapped = list(places)
            swapped[a], swapped[b] = places[b], places[a]
            moves.append(swapped)
        return moves


def _numbered(names: list[str], connections: Mapping[tuple[str, str], float]) -> list[tuple[int, int, float]]:
    return [(names.index(a), names.index(b), weight) for (a, b), weight in connections.items() if a != b]


def _refuse(sizes: Mapping[str, int], connections: Mapping[tuple[str, str], float], devices: Sequence[Device]) -> None:
    if not devices:
        raise UserError("There is no device to assign networks to; use cpu.")
    unknown = sorted({name for pair in connections for name in pair if name not in sizes})
    if unknown:
        raise UserError(f'A connection names "{unknown[0]}", which has no size; the parts are {", ".join(sizes)}.')
    most = max(device.free for device in devices)
    for name, size in sizes.items():
        if size > most:
            raise UserError(
                f"{name} needs {size:,} bytes, more than {_told(devices)}; make it smaller, or use a device with more "
                "memory."
            )


def _told(devices: Sequence[Device]) -> str:
    return ", ".join(f"{device.name} ({device.free:,} bytes free)" for device in devices)
