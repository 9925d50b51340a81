"""Assignments whose best answer is known, and random ones against a bound."""

from __future__ import annotations

import itertools
import random

import pytest

from ludus.core.errors import UserError
from ludus.parallel import devices
from ludus.parallel.devices import Device, assign, assign_workers, cgroup_room

PAIR = [Device("cuda:0", 100), Device("cuda:1", 100)]


def test_two_equal_parts_without_traffic_are_spread():
    assert set(assign({"a": 50, "b": 50}, {}, PAIR).values()) == {"cuda:0", "cuda:1"}


def test_traffic_keeps_parts_together():
    """Actor and critic talk, the third part is alone."""
    placed = assign({"actor": 30, "critic": 30, "other": 40}, {("actor", "critic"): 9.0, ("actor", "other"): 0.5}, PAIR)
    assert placed["actor"] == placed["critic"] != placed["other"]


def test_memory_is_never_overdrawn_even_where_traffic_asks():
    placed = assign({"a": 60, "b": 60}, {("a", "b"): 1e9}, PAIR)
    assert placed["a"] != placed["b"]


def test_a_fast_device_takes_all_where_it_pays():
    fast = [Device("cpu", 10**6, 1.0), Device("cuda", 10**6, 50.0)]
    assert set(assign({"a": 10, "b": 10}, {("a", "b"): 1.0}, fast).values()) == {"cuda"}


def test_what_does_not_fit_is_said():
    with pytest.raises(UserError, match=r"big needs 200 bytes, more than cuda:0 \(100 bytes free\)"):
        assign({"big": 200}, {}, PAIR)
    with pytest.raises(UserError, match="do not fit together on"):
        assign({"a": 90, "b": 90, "c": 90}, {}, PAIR)
    with pytest.raises(UserError, match="no device"):
        assign({"a": 1}, {}, [])
    with pytest.raises(UserError, match='"x", which has no size'):
        assign({"a": 1}, {("a", "x"): 1.0}, PAIR)


def test_nothing_to_assign():
    assert assign({}, {}, PAIR) == {}


@pytest.mark.parametrize("seed", range(20))
def test_the_search_is_near_the_best(seed, monkeypatch):
    draw = random.Random(seed)
    sizes = {f"p{i}": draw.randint(5, 40) for i in range(6)}
    connections = {pair: draw.random() for pair in itertools.combinations(sizes, 2) if draw.random() < 0.4}
    machine = [Device("x", 120, 1.0), Device("y", 100, 2.0), Device("z", 90, 1.5)]
    best = assign(sizes, connections, machine)
    monkeypatch.setattr(devices, "EXHAUSTIVE", 0)
    found = assign(sizes, connections, machine)
    assert found == assign(sizes, connections, machine)
    problem = devices._Problem(list(sizes.values()), devices._numbered(list(sizes), connections), machine)
    at = [device.name for device in machine]
    costs = [problem.cost([at.index(placed[name]) for name in sizes]) for placed in (best, found)]
    assert costs[0] <= costs[1] <= 1.25 * costs[0]
    for device in machine:
        assert sum(sizes[name] for name in sizes if found[name] == device.name) <= device.free


def test_many_parts_are_assigned_by_search():
    sizes = {f"p{i}": 1 + i % 3 for i in range(20)}
    placed = assign(sizes, {}, PAIR)
    loads = [sum(sizes[name] for name in sizes if placed[name] == device.name) for device in PAIR]
    assert abs(loads[0] - loads[1]) <= 1


def test_workers_take_turns_by_speed():
    assert assign_workers(4, PAIR) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    mixed = assign_workers(9, [Device("slow", 1, 1.0), Device("fast", 1, 2.0)])
    assert mixed.count("fast") == 6
    assert assign_workers(0, PAIR) == []
    with pytest.raises(UserError, match="no device"):
        assign_workers(1, [])


def test_the_limit_of_a_container_counts(tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/a/b\n2:cpu:/a\n0::/a/b\n")
    assert cgroup_room(tmp_path / "none", groups) == cgroup_room(tmp_path, tmp_path / "none") == 1 << 62
    second = tmp_path / "root" / "a"  # its parent's limit is the lower one
    first = tmp_path / "root" / "memory" / "a" / "b"
    for folder, limit, used, cached in (
        (second, "memory.max 900", "memory.current 300", "inactive_file 100"),
        (second / "b", "memory.max max", "memory.current 300", "inactive_file 100"),
        (first, "memory.limit_in_bytes 2000", "memory.usage_in_bytes 500", "total_inactive_file 50"),
    ):
        folder.mkdir(parents=True)
        for name, value in (limit.split(), used.split()):
            (folder / name).write_text(f"{value}\n")
        (folder / "memory.stat").write_text(f"cache 7\n{cached}\n")
    assert cgroup_room(tmp_path / "root", groups) == 700
    (second / "memory.max").unlink()
    assert cgroup_room(tmp_path / "root", groups) == 1550
