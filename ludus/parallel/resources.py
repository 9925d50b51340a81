"""CPU cores and memory available to this process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int:
    """Return the bytes of memory available, within the cgroup limits of this process."""
    return min(_available(), cgroup_memory())


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes left within cgroup limits (version 1 or 2), as set for a container."""
    free = 1 << 62
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return free
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
            with suppress(OSError, ValueError, KeyError):  # no limit ("max"), or no such group
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = min(free, max(limit - used + int(counts[names[2]]), 0))  # cached files can be evicted
    return free


def _available() -> int:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: assume that there is enough
        return 1 << 62
