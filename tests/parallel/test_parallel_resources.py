"""Memory limits of cgroups."""

from __future__ import annotations

from ludus.parallel.resources import cgroup_memory


def test_cgroup_limits(tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/a/b\n2:cpu:/a\n0::/a/b\n")
    assert cgroup_memory(tmp_path / "none", groups) == cgroup_memory(tmp_path, tmp_path / "none") == 1 << 62
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
    assert cgroup_memory(tmp_path / "root", groups) == 700
    (second / "memory.max").unlink()
    assert cgroup_memory(tmp_path / "root", groups) == 1550
