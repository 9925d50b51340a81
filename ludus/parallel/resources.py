"""The cores and the memory that this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
